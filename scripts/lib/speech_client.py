"""Speech sent to a running server's /generate.

Every clip goes as 16 kHz mono, so that the server has nothing to resample and all modes get the
same samples.
"""

import base64
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from scripts.lib.client import TIMEOUT_S
from scripts.lib.http_client import HTTP
from scripts.speech_data import Clip, encode
from speech.audio import SAMPLE_RATE

MAX_NEW_TOKENS = 224  # openai-whisper's limit: half of the decoder's positions
AUTOREGRESSIVE = "AR"
TWO_PASS = "TSP"
PUBLISHED_TWO_PASS = "TSP (paper)"
# custom_params by the name in SpecASR's tables.
MODES: dict[str, dict[str, Any]] = {
    AUTOREGRESSIVE: {"drafter": "none"},
    "(8,1)": {"specasr": {"mode": "fixed", "length": 8, "beams": 1}},
    "(16,1)": {"specasr": {"mode": "fixed", "length": 16, "beams": 1}},
    "(8,2)": {"specasr": {"mode": "fixed", "length": 8, "beams": 2}},
    "ASP": {"specasr": {"mode": "asp"}},
    "ASP+recycling": {"specasr": {"mode": "recycling"}},
    PUBLISHED_TWO_PASS: {"specasr": {"mode": "tsp", "length": 24, "feedback": False}},
    TWO_PASS: {"specasr": {"mode": "tsp"}},
}
BASELINES = ("(8,1)", "(16,1)", "(8,2)")


@dataclass(frozen=True)
class Transcript:
    """What a server made of a clip.

    Attributes:
        token_ids: the output.
        text: the same, decoded.
        seconds: from sending the request to its end.
        accept_length: tokens per verify step; 1 without speculation.
        frames: that its tokens attend to, where the request asked (`attended_frames`).
    """

    token_ids: list[int]
    text: str
    seconds: float
    accept_length: float = 1.0
    frames: tuple[int, ...] = ()


@dataclass(frozen=True)
class Speech:
    """A clip ready to send: 16 kHz mono in a WAV file, as a data URL."""

    clip: Clip
    url: str

    @classmethod
    def of(cls, clip: Clip) -> "Speech":
        mono = Clip(clip.name, clip.mono(SAMPLE_RATE)[None], SAMPLE_RATE)
        return cls(clip, "data:audio/wav;base64," + base64.b64encode(encode(mono)).decode())


def transcribe(
    base_url: str, speech: Speech, params: Mapping[str, Any] | None = None, **sampling: Any
) -> Transcript:
    """One clip of at most 30 s, greedy; the language is English, the processor's default.

    Args:
        params: custom_params, such as those in MODES.
        sampling: further sampling_params of SGLang.
    """
    settings: dict[str, Any] = {
        "temperature": 0.0, "max_new_tokens": MAX_NEW_TOKENS, **sampling
    }  # fmt: skip
    if params:
        settings["custom_params"] = dict(params)
    body = {
        "text": "",  # the decoder's prompt comes from SGLang's Whisper processor
        "audio_data": speech.url,
        "modalities": ["audio"],
        "sampling_params": settings,
    }
    start = time.perf_counter()
    response = HTTP.post(base_url + "/generate", json=body, timeout=TIMEOUT_S)
    seconds = time.perf_counter() - start
    if not response.is_success:
        raise RuntimeError(f"{speech.clip.name}: HTTP {response.status_code}: {response.text}")
    answer = response.json()
    meta = answer["meta_info"]
    accept_length = meta.get("spec_accept_length") or 1.0
    frames = tuple(meta.get("attended_frames") or ())
    return Transcript(answer["output_ids"], answer["text"], seconds, accept_length, frames)


def transcribe_all(
    base_url: str,
    clips: Sequence[Speech],
    params: Mapping[str, Any] | None = None,
    *,
    in_flight: int = 1,
    label: str = "",
) -> list[Transcript]:
    """Every clip's transcript, `in_flight` at a time, with a progress bar on a terminal."""
    with ThreadPoolExecutor(in_flight) as pool:
        answers = pool.map(lambda speech: transcribe(base_url, speech, params), clips)
        return list(tqdm(answers, total=len(clips), desc=label, disable=None, leave=False))
