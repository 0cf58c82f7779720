"""The fetched Whispers are right by what they say: through transformers, and through SGLang."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jiwer
import pytest
import soundfile
import torch
import torchaudio
from transformers import AutoProcessor, WhisperForConditionalGeneration

from scripts.lib.data_folder import data_folder
from scripts.lib.http_client import HTTP
from sglang_ext.models import resolve
from sglang_ext.sweep.data_files import CARRIED

CARRIED_CLIP = CARRIED / "LJ001-0001.flac"
CARRIED_TEXT = (
    "Printing, in the only sense with which we are at present concerned, differs from most if "
    "not from all the arts and crafts represented in the Exhibition"
)
SPEECH = data_folder("speech")
SAMPLE_RATE = 16_000
# Of plain greedy decoding on LJ001-0001 to -0016 and jfk: base 4.3%, tiny.en 5.6% (spelling
# variants counted as errors).
MAX_WER = 0.08


def words(text: str) -> str:
    return " ".join(re.sub(r"[^a-z0-9' ]+", " ", text.lower()).split())


def transcribe_here(name: str, clip: Path) -> str:
    """What transformers' own greedy decoding says of a mono or stereo clip."""
    path = resolve(name)
    processor = AutoProcessor.from_pretrained(path)
    model = WhisperForConditionalGeneration.from_pretrained(path).eval()
    samples, rate = soundfile.read(clip, dtype="float32", always_2d=True)
    mono = torch.from_numpy(samples.mean(axis=1))
    audio = torchaudio.functional.resample(mono, rate, SAMPLE_RATE).numpy()
    features = processor.feature_extractor(audio, sampling_rate=SAMPLE_RATE, return_tensors="pt")
    with torch.no_grad():
        tokens = model.generate(features.input_features, do_sample=False, num_beams=1)
    return processor.tokenizer.decode(tokens[0], skip_special_tokens=True)


def transcribe_there(base_url: str, clip: Path) -> str:
    response = HTTP.post(
        base_url + "/v1/audio/transcriptions",
        files={"file": (clip.name, clip.read_bytes())},
        data={"model": "whisper-base", "language": "en", "temperature": "0"},
        timeout=300,
    )
    assert response.is_success, response.text
    return response.json()["text"]


@pytest.mark.parametrize("name", ["whisper-tiny.en", "whisper-base"])
def test_whisper_through_transformers(name):
    """No language is given: base must find it, and must transcribe rather than translate."""
    text = transcribe_here(name, CARRIED_CLIP)
    assert jiwer.wer(words(CARRIED_TEXT), words(text)) < MAX_WER, text


def test_whisper_through_sglang(whisper_server):
    text = transcribe_there(whisper_server.base_url, CARRIED_CLIP)
    assert jiwer.wer(words(CARRIED_TEXT), words(text)) < MAX_WER, text


@pytest.mark.skipif(not SPEECH.is_dir(), reason=f"no speech data at {SPEECH}")
def test_whisper_through_sglang_on_sixteen_sentences(whisper_server):
    rows = [line.split("\t") for line in (SPEECH / "references.tsv").read_text().splitlines()]
    clips = {SPEECH / row[0]: row[-1] for row in rows if row[0].startswith(("LJ001", "jfk"))}
    assert len(clips) >= 16
    spoken = [words(text) for text in clips.values()]
    with ThreadPoolExecutor(4) as pool:
        texts = pool.map(lambda clip: transcribe_there(whisper_server.base_url, clip), clips)
        heard = [words(text) for text in texts]
    assert jiwer.wer(spoken, heard) < MAX_WER, heard
