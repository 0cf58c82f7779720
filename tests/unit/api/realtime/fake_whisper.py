"""A Whisper that hears bursts of a level as words, with its real vocabulary, and no model."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from speech.audio import SAMPLE_RATE
from speech.chunks import FRAME_S
from speech.prompts import TIMESTAMP_S, WhisperVocabulary
from speech.segments import Decoded
from speech.vad import FRAME_SAMPLES

WORDS = [
    "alpha",
    "bravo",
    "charlie",
    "delta",
    "echo",
    "foxtrot",
    "golf",
    "hotel",
    "india",
    "juliett",
]
_LOWEST, _STEP = 0.2, 0.06
WORD_S, GAP_S = 0.3, 0.1


def level(word: str) -> float:
    """How loud a word is."""
    return _LOWEST + _STEP * WORDS.index(word)


def spoken(words: list[str], silence_s: float = 0.0, rate: int = SAMPLE_RATE) -> np.ndarray:
    """Samples, float32[n]: each word a burst with a gap behind it, and a silence at the end."""
    parts = []
    for word in words:
        parts += [np.full(round(WORD_S * rate), level(word)), np.zeros(round(GAP_S * rate))]
    return np.concatenate([*parts, np.zeros(round(silence_s * rate))]).astype(np.float32)


class Loudness:
    """Speech is what is loud, and the gap between words."""

    def __init__(self) -> None:
        self._rest = np.empty(0, np.float32)

    def push(self, samples: np.ndarray, last: bool = False) -> np.ndarray:
        samples = np.concatenate([self._rest, samples])
        if last:
            samples = np.pad(samples, (0, -len(samples) % FRAME_SAMPLES))
        whole = len(samples) // FRAME_SAMPLES * FRAME_SAMPLES
        self._rest = samples[whole:]
        return (np.abs(samples[:whole]).reshape(-1, FRAME_SAMPLES).mean(1) > 0.1).astype(np.float32)


@dataclass
class FakeWhisper:
    """WhisperEngine, as far as sessions use it.

    Attributes:
        gate: requests wait here, if it is not set.
        fault: raised by each request.
        tells: whether it tells which frames words attend to: their ends.
        calls: custom_params and prompt text of each one.
        limits: seconds of audio and the most tokens of each one.
        tasks: what each one was asked to do, as its prompt says it.
        aborted: requests that were given up.
    """

    vocabulary: WhisperVocabulary = field(default_factory=lambda: WhisperVocabulary(51_864))
    context: int = 448
    model_names: tuple[str, ...] = ("fake", "/models/fake")
    fault: Exception | None = None
    tells: bool = True
    calls: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    limits: list[tuple[float, int | None]] = field(default_factory=list)
    tasks: set[str] = field(default_factory=set)
    running: int = 0
    aborted: int = 0
    detected: int = 0

    def __post_init__(self):
        self.gate = asyncio.Event()
        self.gate.set()

    async def gate_set(self, is_open):
        """Open or close the gate, from another thread."""
        (self.gate.set if is_open else self.gate.clear)()

    async def detect_language(self, chunk, custom_params):
        self.detected += 1
        return "de"

    async def decode(
        self, chunk, prompt, temperature, custom_params, stream=False, most_tokens=None
    ):
        start = prompt.index(self.vocabulary.start)
        self.calls.append((dict(custom_params), self.vocabulary.decode(prompt[:start])))
        self.limits.append((len(chunk.samples) / 16_000, most_tokens))
        special = self.vocabulary.tokenizer.special_tokens
        self.tasks |= {t for t in ("transcribe", "translate") if special[f"<|{t}|>"] in prompt}
        self.running += 1
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
            if self.fault is not None:
                raise self.fault
            asked = min(custom_params.get("attended_frames", 0), len(chunk.samples) // 320)
            yield self._heard(chunk.samples, asked if self.tells else 0)
        except BaseException as error:
            self.aborted += not isinstance(error, Exception)
            raise
        finally:
            self.running -= 1

    def _heard(self, samples: np.ndarray, asked: int) -> Decoded:
        loud = np.concatenate([[False], np.abs(samples) > _LOWEST / 2, [False]])
        edges = np.flatnonzero(np.diff(loud.astype(np.int8))).reshape(-1, 2)
        bursts = [(a, b) for a, b in edges if b - a > 0.05 * SAMPLE_RATE]
        end = bursts[-1][1] / SAMPLE_RATE if bursts else 0.0
        first = self.vocabulary.first_timestamp
        tokens, frames = [], []
        for a, b in bursts:
            word = self.vocabulary.tokenizer.encode(" " + self._word(samples[a:b]))
            tokens += word
            frames += [round(b / SAMPLE_RATE / FRAME_S)] * len(word)
        tokens.append(first + round(end / TIMESTAMP_S))
        frames = [*(min(frame, asked - 1) for frame in frames), asked - 1] if asked else []
        logprobs = (-0.1,) * (len(tokens) + 1)
        return Decoded(tuple(tokens), logprobs, 0.01, frames=tuple(frames))

    def _word(self, burst: np.ndarray) -> str:
        if len(burst) < 0.8 * WORD_S * SAMPLE_RATE:
            return "mm"
        return WORDS[round((float(np.median(burst)) - _LOWEST) / _STEP)]
