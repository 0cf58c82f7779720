"""What /generate takes as audio: opened by SGLang's rules, decoded in another process."""

import base64
import os
from pathlib import Path
from typing import Any

import fastapi
import numpy as np
import pytest

from scripts.speech_data import Clip, encode
from sglang_ext.whisper import audio_decoders
from sglang_ext.whisper.audio_processor import PcmAudio, checked_prompt, first_window, opened
from speech.audio import SAMPLE_RATE, WINDOW_SAMPLES
from speech.audio_errors import DecodersBusy
from speech.decoders import DecoderPool
from tests.unit.speech.wav_files import wav_file


@pytest.fixture(scope="module", autouse=True)
def pool():
    made = DecoderPool(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audio_decoders, "pool", lambda: made)
        yield made
    made.close()


def window(audio: Any) -> np.ndarray:
    return first_window(opened(audio))


def wav(seconds: float) -> bytes:
    samples = np.random.default_rng(0).normal(0, 0.1, (1, int(seconds * SAMPLE_RATE)))
    return encode(Clip("x", samples.astype(np.float32), SAMPLE_RATE))


def test_bytes_paths_and_data_urls_are_the_same(tmp_path: Path):
    data, path = wav(1), tmp_path / "with space.wav"
    path.write_bytes(data)
    url = "data:audio/wav;base64," + base64.b64encode(data).decode()
    expected = window(data)
    assert len(expected) == SAMPLE_RATE
    for audio in (url, str(path), f"file://{tmp_path}/with%20space.wav", PcmAudio(expected)):
        np.testing.assert_array_equal(window(audio), expected)


def test_only_what_whisper_reads_is_decoded(pool):
    samples = window(wav(40))
    assert len(samples) == WINDOW_SAMPLES
    assert len(window(PcmAudio(np.zeros(40 * SAMPLE_RATE, np.float32)))) == WINDOW_SAMPLES


def test_eight_channels_are_mixed_and_cost_no_process(pool):
    samples = window(wav_file(np.full((1600, 8), 8192, np.int16), SAMPLE_RATE))
    np.testing.assert_allclose(samples, 0.25, atol=1e-6)
    assert pool.deaths == 0


@pytest.mark.parametrize(
    "audio",
    ["", "data:audio/wav", "data:x;base64,!!", "/nowhere.wav", "/dev/zero", "/", "file:///",
     "a" * 10_000, "nul\0", 7, {"url": "x"}, b"", b"no audio", "http://127.0.0.1:9/x.wav"],
)  # fmt: skip
def test_what_is_no_audio_is_a_value_error(audio):
    with pytest.raises(ValueError):
        window(audio)


def test_a_pipe_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="no regular file"):
        window(str(tmp_path / "pipe"))


def test_a_full_queue_is_a_503(pool, monkeypatch):
    def busy(*_: object) -> None:
        raise DecodersBusy("3 audio files wait")

    monkeypatch.setattr(pool, "run", busy)
    with pytest.raises(fastapi.HTTPException) as raised:
        window(wav(1))
    assert (raised.value.status_code, raised.value.detail) == (503, "3 audio files wait")


@pytest.mark.parametrize("ids", [[50_257, 51_865], [-1], ["1"], [1.0], [True], [[1]], [None]])
def test_prompts_outside_the_vocabulary_are_refused(ids):
    with pytest.raises(ValueError, match="from 0 to 51864"):
        checked_prompt(ids, 51_865)
    assert checked_prompt([0, 51_864], 51_865) == [0, 51_864]
