"""What of a chunk's speech the model left out, so that it can be decoded after all.

Whisper ends early now and then: after a timestamp, with the rest of the window unread
(openai-whisper's transcribe() goes on from there), or in the middle, without any. The VAD knows
where speech is, and so what is missing.
"""

import dataclasses

from speech.chunks import Chunk
from speech.prompts import SPACELESS, TIMESTAMP_S, WhisperVocabulary
from speech.segments import Decoded

# Timestamps are off by some tenths of a second; less speech than this after the last one is none.
_MISSED_S = 1.0
# Characters for a second of speech; people say 12 to 20, a third of it where there are no spaces.
_SLOWEST, _FASTEST = 6.0, 25.0
_LEAST_TAIL_S = 4.0
# How far from a timestamp its silence may lie.
_SNAP_S = 1.0


def left_out(
    chunk: Chunk, decoded: Decoded, vocabulary: WhisperVocabulary, language: str
) -> tuple[Decoded, list[Chunk]]:
    """What to keep of a chunk's tokens, and what of its audio to decode again.

    Args:
        decoded: written with timestamps.
        language: ISO code.
    """
    tokens = decoded.tokens
    last = max((i for i, t in enumerate(tokens) if t >= vocabulary.first_timestamp), default=-1)
    time = (tokens[last] - vocabulary.first_timestamp) * TIMESTAMP_S if last >= 0 else 0.0
    time = min(time, chunk.duration)
    scale = 1 / 3 if language in SPACELESS else 1.0
    before = len(vocabulary.decode(tokens[:last])) if last > 0 else 0
    tail = len(vocabulary.decode(tokens[last + 1 :]).strip())
    spoken, missing = speech_seconds(chunk, 0.0, time), speech_seconds(chunk, time)
    if not tail:
        # So much text in so little time: the timestamp is wrong, not the text short.
        credible = 0 < before <= _FASTEST * scale * max(spoken, 0.1)
        if missing < _MISSED_S or not credible:
            return decoded, []
        return decoded, [chunk.part(nearest_silence(chunk, time))]
    if missing < _LEAST_TAIL_S or tail >= _SLOWEST * scale * missing:
        return decoded, []
    start = nearest_silence(chunk, time) if time else 0.0
    middle = longest_silence(chunk, start)
    if middle is None:
        return decoded, []
    kept = dataclasses.replace(
        decoded,
        tokens=tokens[: last + 1],
        logprobs=decoded.logprobs[: last + 1],
        frames=decoded.frames[: last + 1],
    )
    return kept, [chunk.part(start, middle), chunk.part(middle)]


def speech_seconds(chunk: Chunk, start: float, end: float = float("inf")) -> float:
    """Seconds of speech from `start` to `end`, in seconds of the chunk."""
    return sum(max(0.0, min(last, end) - max(first, start)) for first, last in chunk.speech)


def nearest_silence(chunk: Chunk, time: float) -> float:
    """The middle of the silence nearest to `time`, or `time` itself where none is near."""
    middles = [(a + b) / 2 for a, b in silences(chunk) if a - _SNAP_S <= time <= b + _SNAP_S]
    return min(middles, key=lambda middle: abs(middle - time), default=time)


def longest_silence(chunk: Chunk, start: float) -> float | None:
    """The middle of the longest silence in the middle half of what comes after `start`."""
    length = chunk.duration - start
    low, high = start + length / 4, start + length * 3 / 4
    inside = [(a, b) for a, b in silences(chunk) if low <= (a + b) / 2 <= high]
    longest = max(inside, key=lambda s: s[1] - s[0], default=None)
    return None if longest is None else (longest[0] + longest[1]) / 2


def silences(chunk: Chunk) -> list[tuple[float, float]]:
    """(start, end) of each silence between two stretches of speech."""
    return [
        (end, start) for (_, end), (start, _) in zip(chunk.speech, chunk.speech[1:], strict=False)
    ]
