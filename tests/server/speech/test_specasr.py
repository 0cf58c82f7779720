"""SpecASR on a real server: plain SGLang Whisper's tokens in every mode, alone and in a batch."""

import asyncio
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu
from whisper.model import disable_sdpa

from scripts.lib.http_client import HTTP
from scripts.lib.live_client import FORMATS, stream
from scripts.lib.served_metrics import read_metrics
from scripts.lib.speech_client import (
    MODES,
    Speech,
    Transcript,
    transcribe,
    transcribe_all,
)
from scripts.lib.word_errors import WordErrors
from scripts.speech_data import FOLDER, read_clips
from sglang_ext.models import resolve
from speech.alignment import load_whisper
from speech.audio import SAMPLE_RATE, log_mels
from speech.prompts import WhisperVocabulary
from tests.server.servers import Server
from tests.server.speech.conftest import JFK

CLIPS = 8


@pytest.fixture(scope="module")
def speech() -> list[Speech]:
    return [Speech.of(clip) for clip in read_clips(FOLDER) if clip.seconds < 15][:CLIPS]


@pytest.fixture(scope="module")
def plain(speech, whisper_server) -> list[Transcript]:
    """Plain SGLang's transcripts."""
    return transcribe_all(whisper_server.base_url, speech)


@pytest.fixture(scope="module")
def specasr(plain) -> Iterator[Server]:
    flags = ["--speculative-algorithm", "SSSD", "--draft-model", "whisper-tiny.en"]
    more = ["--drafters", "random", "--enable-metrics"]
    with Server("whisper-base", [*flags, *more], name="specasr") as server:
        yield server


@pytest.mark.parametrize(
    ("mode", "in_flight"),
    [*((mode, CLIPS) for mode in [*MODES, "random", "auto"]), ("AR", 1), ("TSP", 1), ("auto", 1)],
)
def test_tokens_are_plain_sglangs(mode, in_flight, specasr, speech, plain):
    params = {
        "random": {"drafter": "random", "budget": "fixed"},
        "auto": {},
    }.get(mode) or {**MODES.get(mode, {}), "budget": "fixed"}
    got = transcribe_all(specasr.base_url, speech, params, in_flight=in_flight)
    assert [t.token_ids for t in got] == [t.token_ids for t in plain]
    if mode not in ("AR", "random", "auto"):
        assert sum(t.accept_length for t in got) / len(got) > 3


def test_modes_share_a_batch(specasr, speech, plain):
    modes = list(MODES.values())
    with ThreadPoolExecutor(CLIPS) as pool:
        asked = [
            pool.submit(transcribe, specasr.base_url, clip, modes[i % len(modes)])
            for i, clip in enumerate(speech)
        ]
        got = [future.result() for future in asked]
    assert [t.token_ids for t in got] == [t.token_ids for t in plain]


def test_attended_frames_are_whispers_with_any_draft_in_any_batch(specasr, speech, plain):
    """Half of the requests ask; their frames are those of openai-whisper's own attention."""
    modes: list[dict[str, Any]] = [
        {"drafter": "none"}, {"specasr": {"mode": "tsp"}}, {"specasr": {"mode": "fixed"}},
        {"drafter": "random"},
    ]  # fmt: skip
    clips = speech[:2]
    asked = [math.ceil(len(clip.clip.mono(SAMPLE_RATE)) / 320) for clip in clips]
    jobs = [
        (i, {**mode, "budget": "fixed", **extra})
        for mode in modes
        for i in range(len(clips))
        for extra in ({"attended_frames": asked[i]}, {})
    ]
    with ThreadPoolExecutor(len(jobs)) as pool:
        got = list(pool.map(lambda job: transcribe(specasr.base_url, clips[job[0]], job[1]), jobs))
    wanted = [whispers_frames(clips[i], plain[i].token_ids, asked[i]) for i in range(len(clips))]
    for (i, params), made in zip(jobs, got, strict=True):
        assert made.token_ids == plain[i].token_ids, params
        assert len(made.frames) == (len(made.token_ids) if "attended_frames" in params else 0)
        apart = [abs(a - b) for a, b in zip(made.frames, wanted[i], strict=False)]
        # Sums are in another order: where two frames weigh the same, either may be it.
        assert sum(a > 1 for a in apart) <= len(apart) // 20, (params, made.frames, wanted[i])


def test_a_part_of_the_window_gives_whispers_tokens_in_any_batch(specasr, speech):
    """Parts of several lengths and whole windows in one batch, with drafts and without."""
    clips = speech[:3]
    parts = [round(clip.clip.seconds * 50) + 150 for clip in clips]
    wanted = [
        transcribe(specasr.base_url, clip, {"drafter": "none", "audio_ctx": part}).token_ids
        for clip, part in zip(clips, parts, strict=True)
    ]
    for clip, part, tokens in zip(clips, parts, wanted, strict=True):
        assert tokens == whispers_choice(clip, tokens, part)
    jobs = [
        (i, {**mode, "budget": "fixed", **extra})
        for mode in ({"drafter": "none"}, {"specasr": {"mode": "tsp"}}, {"drafter": "random"})
        for i in range(len(clips))
        for extra in ({"audio_ctx": parts[i]}, {})
    ]
    with ThreadPoolExecutor(len(jobs)) as pool:
        got = list(pool.map(lambda job: transcribe(specasr.base_url, clips[job[0]], job[1]), jobs))
    whole = [made.token_ids for made in got[1::2]]
    assert [made.token_ids for made in got[::2]] == [wanted[i] for i, _ in jobs[::2]]
    assert whole == whole[: len(clips)] * 3
    body = {
        "text": "",
        "audio_data": clips[0].url,
        "sampling_params": {"custom_params": {"audio_ctx": 0}},
    }
    refused = HTTP.post(specasr.base_url + "/generate", json=body, timeout=60)
    assert refused.status_code == 400 and "custom_params.audio_ctx must be" in refused.text


def whispers_choice(speech: Speech, tokens: list[int], frames: int) -> list[int]:
    """What openai-whisper, which hears so many frames, finds likeliest at each of the tokens."""
    model = load_whisper(Path(resolve("whisper-base")))
    encoder = model.encoder
    mel = log_mels(speech.clip.mono(SAMPLE_RATE), model.dims.n_mels)[None, :, : 2 * frames]
    prompt = WhisperVocabulary(model.dims.n_vocab).prompt("en")
    with torch.inference_mode():
        x = gelu(encoder.conv2(gelu(encoder.conv1(mel)))).mT + encoder.positional_embedding[:frames]
        for block in encoder.blocks:
            x = block(x)
        logits = model.decoder(torch.tensor([[*prompt, *tokens]]), encoder.ln_post(x))
    return logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()


def whispers_frames(speech: Speech, tokens: list[int], frames: int) -> list[int]:
    """The frame that weighs most in openai-whisper's alignment heads, for each token."""
    folder = Path(resolve("whisper-base"))
    model = load_whisper(folder)
    weights: dict[int, torch.Tensor] = {}
    for layer, block in enumerate(model.decoder.blocks):
        block.cross_attn.register_forward_hook(
            lambda _m, _i, made, layer=layer: weights.__setitem__(layer, made[1][0])
        )
    mel = log_mels(speech.clip.mono(SAMPLE_RATE), model.dims.n_mels)
    prompt = WhisperVocabulary(model.dims.n_vocab).prompt("en")
    with torch.inference_mode(), disable_sdpa():
        model(mel[None], torch.tensor([[*prompt, *tokens]]))
    rows = slice(len(prompt) - 1, len(prompt) - 1 + len(tokens))
    chosen = model.alignment_heads.indices().T.tolist()
    read = [weights[layer][head, rows, :frames].softmax(-1) for layer, head in chosen]
    return torch.stack(read).mean(0).argmax(-1).tolist()


def test_a_live_session_shows_words_by_what_they_attend_to(specasr):
    """In real time, with SpecASR's drafts and the last hypothesis's.

    A slow machine hears more audio at a step, and AlignAtt keeps what it showed: some words may
    differ, most may not.
    """
    clip = next(clip for clip in read_clips(FOLDER) if clip.name == "jfk.flac")
    runs = [
        asyncio.run(
            stream(specasr.base_url, "none", clip, FORMATS[0], {"live_policy": p, "step_ms": 1000})
        )
        for p in ("localagreement", "alignatt")
    ]
    for run in runs:
        assert not run.errors and not run.mismatches
        assert WordErrors([f"And so my fellow Americans, {JFK}"]).rate([run.text]) < 0.4, run.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "magic"}, "custom_params.specasr.mode 'magic': expected one of fixed, asp"),
        ({"length": 0}, "custom_params.specasr.length 0: expected a whole number 1..64"),
        ({"speed": 9}, "custom_params.specasr.speed is unknown"),
        ("fast", "custom_params.specasr must be an object"),
    ],
)
def test_wrong_options_are_refused_by_name(options, message, specasr, speech):
    body = {
        "text": "",
        "audio_data": speech[0].url,
        "sampling_params": {"custom_params": {"specasr": options}},
    }
    answer = HTTP.post(specasr.base_url + "/generate", json=body, timeout=60)
    assert answer.status_code == 400 and message in answer.text


def test_metrics_tell_drafting_from_verifying(specasr, speech):
    # Eight tokens a draft, none of them read along with the prompt: every machine has rounds.
    grown = growth_of_metrics(specasr, speech[0], "(8,1)")
    assert grown["draft_prefill_steps_total"] == 1 and grown["draft_prefill_seconds_total"] > 0
    assert grown["verify_steps_total"] >= 1 and grown["verify_seconds_total"] > 0
    assert grown["drafter.draft_steps"] > 0 and grown["drafter.accepted_tokens"] > 0
    assert grown["drafter.accepted_tokens"] <= grown["drafter.predicted_tokens"] * 2


def test_metrics_tell_what_the_prefill_had_verified(specasr, speech):
    # How much that is depends on the machine's rounding: the whole transcript on some.
    grown = growth_of_metrics(specasr, speech[0], "TSP")
    assert grown["known_steps_total"] == 1 and grown["prefill_decoder_seconds_total"] > 0
    assert grown["accept_length_sum"] > 3 and grown["drafter.accepted_tokens"] > 0


def growth_of_metrics(server: Server, clip: Speech, mode: str) -> dict[str, float]:
    """What a transcription adds to the server's metrics."""
    before = read_metrics(server.base_url)
    transcribe(server.base_url, clip, {**MODES[mode], "budget": "fixed"})
    after = read_metrics(server.base_url)
    return {name: value - before.get(name, 0.0) for name, value in after.items()}
