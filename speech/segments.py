"""What Whisper wrote for a chunk -> segments with times; joining chunks; signs of invention."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from whisper.utils import compression_ratio as compression_ratio  # speech.prompts loads it too

from speech.chunks import FRAME_S, Chunk
from speech.prompts import SPACELESS, TIMESTAMP_S, WhisperVocabulary

# openai-whisper's transcribe.py.
MAX_COMPRESSION_RATIO = 2.4
MIN_AVG_LOGPROB = -1.0
MAX_NO_SPEECH_PROB = 0.6

_LOOP_REPEATS = 4  # so many in a row are no speech
_LONGEST_LOOP = 64  # tokens


@dataclass(frozen=True)
class Decoded:
    """What the model wrote for one chunk.

    Attributes:
        tokens: output ids, <|endoftext|> left out.
        logprobs: of each of them, and of <|endoftext|> where it came.
        no_speech_prob: of <|nospeech|> at <|startoftranscript|>; nan where it is not known.
        temperature: it was sampled at.
        finished: it ended with <|endoftext|>, not at the length limit.
        frames: of each of the tokens, the encoder's frame (20 ms) that it attends to most; -1 where
            that is not known; empty: it was not asked for.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    no_speech_prob: float = math.nan
    temperature: float = 0.0
    finished: bool = True
    frames: tuple[int, ...] = ()

    @property
    def avg_logprob(self) -> float:
        """As openai-whisper: the sum over one more than the text's tokens."""
        return sum(self.logprobs) / (len(self.tokens) + 1)


@dataclass(frozen=True)
class Word:
    """A word with its times in seconds."""

    word: str
    start: float
    end: float


@dataclass(frozen=True)
class Segment:
    """A stretch of text; times in seconds of the whole audio.

    Attributes:
        seek: where its chunk begins, in frames of 10 ms.
        tokens: with the timestamps that the model wrote.
        looks: the second of the audio that each of them attends to most, nan where that is not
            known; empty: it was not asked for.
        logprobs: of each of them; empty: not known.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    looks: tuple[float, ...] = ()
    logprobs: tuple[float, ...] = ()


@dataclass
class Transcript:
    """A whole transcript.

    Attributes:
        language: ISO code.
        duration: of the audio, in seconds.
        token_ids: output ids of each pass over a chunk, as they came, in order.
    """

    task: str
    language: str
    duration: float = 0.0
    text: str = ""
    segments: list[Segment] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    logprobs: list[tuple[int, float]] = field(default_factory=list)
    token_ids: list[tuple[int, ...]] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0


def needs_fallback(decoded: Decoded, text: str) -> bool:
    """Whether to decode again at a higher temperature (openai-whisper's rule)."""
    if is_silent(decoded):
        return False
    repeats = compression_ratio(text) > MAX_COMPRESSION_RATIO
    return repeats or decoded.avg_logprob < MIN_AVG_LOGPROB


def is_silent(decoded: Decoded) -> bool:
    """Whether it is no speech after all (openai-whisper's rule)."""
    return decoded.no_speech_prob > MAX_NO_SPEECH_PROB and decoded.avg_logprob < MIN_AVG_LOGPROB


def without_loop(tokens: Sequence[int]) -> tuple[int, ...]:
    """Tokens up to the first repetition of a loop that they end in.

    A loop is a run of at most 64 tokens that stands at the end four times or more.
    """
    tokens = tuple(tokens)
    for length in range(1, min(_LONGEST_LOOP, len(tokens) // _LOOP_REPEATS) + 1):
        # The last round may have been cut off by the length limit.
        same = 0
        while same + length < len(tokens) and tokens[-1 - same] == tokens[-1 - same - length]:
            same += 1
        if same >= (_LOOP_REPEATS - 1) * length:
            return tokens[: len(tokens) - same]
    return tokens


def chunk_segments(
    chunk: Chunk, decoded: Decoded, vocabulary: WhisperVocabulary, first_id: int = 0
) -> list[Segment]:
    """The segments of a chunk, from whatever timestamps the model wrote.

    Each timestamp ends a segment and begins the next. Without openai-whisper's constrained
    decoding they may be missing, run backwards or lie past the end; then the speech that the VAD
    found gives the times.
    """
    ratio = compression_ratio(vocabulary.decode(decoded.tokens))
    segments: list[Segment] = []
    for start, end, places in _timed(chunk, decoded, vocabulary):
        tokens = tuple(decoded.tokens[i] for i in places)
        words = vocabulary.decode(tokens)
        if not words.strip():
            continue
        at, until = chunk.source_time(start), chunk.source_time(end, end=True)
        segments.append(
            Segment(
                id=first_id + len(segments),
                seek=round(chunk.pieces[0].source_start * 100),
                start=round(at, 2),
                end=round(min(max(until, at + TIMESTAMP_S), chunk.source_end), 2),
                text=words,
                tokens=tokens,
                temperature=decoded.temperature,
                avg_logprob=decoded.avg_logprob,
                compression_ratio=ratio,
                no_speech_prob=decoded.no_speech_prob,
                looks=tuple(_look(chunk, decoded.frames[i]) for i in places if decoded.frames),
                logprobs=tuple(decoded.logprobs[i] for i in places if decoded.logprobs),
            )
        )
    return segments


def _timed(
    chunk: Chunk, decoded: Decoded, vocabulary: WhisperVocabulary
) -> list[tuple[float, float, tuple[int, ...]]]:
    """Of what stands between timestamps: start and end, in seconds of the chunk, and which of the
    tokens it is."""
    last_speech = chunk.speech[-1][1] if chunk.speech else chunk.duration
    parts: list[tuple[float, float, tuple[int, ...]]] = []
    start, text, kept = 0.0, False, []
    for place, token in enumerate(decoded.tokens):
        kept.append(place)
        if token < vocabulary.end:
            text = True
        elif token >= vocabulary.first_timestamp:
            time = (token - vocabulary.first_timestamp) * TIMESTAMP_S
            if time < start or time > chunk.duration + 1.0:
                kept.pop()  # backwards, or past the end
                continue
            time = min(time, chunk.duration)
            if text:
                parts.append((start, time, tuple(kept)))
                text, kept = False, []
            else:
                kept = [place]
            start = time
    if text:
        parts.append((start, max(start, last_speech), tuple(kept)))
    if parts and all(token < vocabulary.first_timestamp for token in decoded.tokens):
        # No timestamps at all: what the VAD heard first begins it.
        parts[0] = (chunk.speech[0][0] if chunk.speech else 0.0, *parts[0][1:])
    return parts


def _look(chunk: Chunk, frame: int) -> float:
    """Seconds of the audio where a frame of the encoder begins; nan for -1."""
    return chunk.source_time(frame * FRAME_S) if frame >= 0 else math.nan


def joined(before: str, text: str, language: str) -> str:
    """What to append to `before` for `text` to follow it: a chunk's text, spaced if need be.

    Whisper writes the space before a word itself; a chunk's first word may come without.
    """
    if not before:
        return text.lstrip()
    if before[-1].isspace():
        return text.lstrip()
    if language in SPACELESS or not text or text[0].isspace():
        return text
    return " " + text
