"""Audio of any length -> chunks that fit Whisper's window, cut at silences.

Cutting in silence, without overlap, doubles and loses no word. Long silences are shortened, so
that Whisper has none to invent words for, and what holds no speech makes no chunk at all. Only
about one chunk of audio is held at a time.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from speech.audio import SAMPLE_RATE
from speech.vad import (
    FRAME_SAMPLES,
    FRAMES_PER_SECOND,
    SpeechDetector,
    default_detector,
    runs,
    speech_mask,
)

WINDOW_S = 30.0
"""What Whisper's encoder reads at once (Radford et al. 2022, section 2.2)."""

FRAME_S = 0.02
"""Seconds of a frame of what it makes of that (the same)."""


@dataclass(frozen=True)
class ChunkOptions:
    """Where audio is cut.

    Attributes:
        threshold: least probability of speech, 0 to 1.
        min_silence_s: a shorter silence is no place to cut.
        max_silence_s: a longer one is shortened to `padding_s` at both ends.
        padding_s: silence left before and after speech where some is taken out.
        least_fill: part of the window to fill, at least, before looking for a place to cut.
        flush_silence_s: after so long a silence the chunk is done, however short.
    """

    threshold: float = 0.5
    min_silence_s: float = 0.1
    max_silence_s: float = 2.0
    padding_s: float = 0.4
    least_fill: float = 0.5
    flush_silence_s: float = 8.0


@dataclass(frozen=True)
class Piece:
    """Where a stretch of a chunk lies in the audio; seconds."""

    start: float
    source_start: float
    duration: float


@dataclass(frozen=True)
class Chunk:
    """One window of audio.

    Attributes:
        index: its number, from 0.
        samples: float32[n] at 16 kHz, at most 30 s.
        pieces: what it is made of, in order.
        speech: (start, end) of each stretch of speech, in seconds of the chunk.
    """

    index: int
    samples: np.ndarray
    pieces: tuple[Piece, ...]
    speech: tuple[tuple[float, float], ...]

    @property
    def duration(self) -> float:
        """Seconds of audio in the chunk."""
        return len(self.samples) / SAMPLE_RATE

    @property
    def source_end(self) -> float:
        """Where it ends in the audio, in seconds."""
        return self.pieces[-1].source_start + self.pieces[-1].duration

    def source_time(self, time: float, end: bool = False) -> float:
        """Seconds of the audio for seconds of the chunk.

        Args:
            end: whether it is the end of something: then a seam belongs to what comes before it.
        """
        chosen = self.pieces[0]
        for piece in self.pieces[1:]:
            if time < piece.start or (end and time == piece.start):
                break
            chosen = piece
        inside = min(max(time - chosen.start, 0.0), chosen.duration)
        return chosen.source_start + inside

    def part(self, start: float, end: float = float("inf")) -> "Chunk":
        """The chunk from `start` to `end`, in its own seconds, as a chunk with the same index."""
        first = round(max(start, 0.0) * SAMPLE_RATE)
        last = min(len(self.samples), round(min(end, self.duration) * SAMPLE_RATE))
        start, end = first / SAMPLE_RATE, last / SAMPLE_RATE

        def inside(begin: float, stop: float) -> tuple[float, float]:
            return max(begin, start) - start, min(stop, end) - start

        pieces = []
        for piece in self.pieces:
            begin, stop = inside(piece.start, piece.start + piece.duration)
            if begin < stop:
                skipped = max(0.0, start - piece.start)
                pieces.append(Piece(begin, piece.source_start + skipped, stop - begin))
        speech = (inside(*stretch) for stretch in self.speech)
        return Chunk(
            self.index,
            self.samples[first:last],
            tuple(pieces),
            tuple(stretch for stretch in speech if stretch[0] < stretch[1]),
        )


def chunks(
    blocks: Iterable[np.ndarray],
    options: ChunkOptions | None = None,
    detector: SpeechDetector | None = None,
) -> Iterator[Chunk]:
    """Cut audio into chunks as it comes.

    Args:
        blocks: float32[n] each, consecutive samples at 16 kHz.
    """
    stream = (detector or default_detector()).stream()
    chunker = _Chunker(options or ChunkOptions())
    for block in blocks:
        yield from chunker.push(block, stream.push(block))
    empty = np.empty(0, np.float32)
    yield from chunker.push(empty, stream.push(empty, last=True), last=True)


def single_chunk(
    samples: np.ndarray, probabilities: np.ndarray, options: ChunkOptions | None = None
) -> Chunk | None:
    """The chunk of audio whose speech is known; None where there is none.

    Args:
        samples: float32[n] at 16 kHz, of less than WINDOW_S.
        probabilities: float32[frames] of speech.
    """
    return next(_Chunker(options or ChunkOptions()).push(samples, probabilities, last=True), None)


class _Chunker:
    """Holds the samples that are in no chunk yet, and the speech probability of their frames."""

    def __init__(self, options: ChunkOptions):
        self._options = options
        self._samples = np.empty(0, np.float32)
        self._probabilities = np.empty(0, np.float32)
        self._origin = 0  # frames that came before
        self._made = 0

    def push(
        self, samples: np.ndarray, probabilities: np.ndarray, last: bool = False
    ) -> Iterator[Chunk]:
        self._samples = np.concatenate([self._samples, samples])
        self._probabilities = np.concatenate([self._probabilities, probabilities])
        while (chunk := self._take(last)) is not None:
            yield chunk

    def _take(self, last: bool) -> Chunk | None:
        """The next chunk, if it is settled what belongs to it."""
        options = self._options
        speech = speech_mask(
            self._probabilities, options.threshold, min_silence_s=options.min_silence_s
        )
        if not speech.any():
            # What may yet become speech stays, with the silence that would come before it.
            self._drop(len(speech) if last else max(0, len(speech) - _frames(2.0)))
            return None
        kept = shorten_silence(speech, options)
        length = np.cumsum(kept)
        window = int(WINDOW_S * FRAMES_PER_SECOND)
        silence = len(speech) - 1 - int(np.flatnonzero(speech)[-1])
        if length[-1] > window:
            end = self._cut(speech, length, window)
        elif last:
            end = len(speech)
        elif silence > _frames(options.flush_silence_s):
            # Half of the silence stays for what follows; max_silence_s shortens it anyway.
            end = len(speech) - silence // 2
        else:
            return None
        chunk = self._chunk(speech[:end], kept[:end])
        self._drop(end)
        return chunk

    def _cut(self, speech: np.ndarray, length: np.ndarray, window: int) -> int:
        """The frame to cut before: in the last long silence of the window, else the longest."""
        low = int(np.searchsorted(length, self._options.least_fill * window))
        high = int(np.searchsorted(length, window, side="right"))
        silences = [
            (max(start, low), min(end, high))
            for start, end in runs(~speech)
            if end > low and start < high and speech[:start].any()
        ]
        if not silences:
            return self._quietest(low + (high - low) // 3, high)
        # From 0.6 s on a silence ends a sentence; longer ones are no better.
        start, end = max(silences, key=lambda s: (min(s[1] - s[0], _frames(0.6)), s[1]))
        return max(1, (start + end) // 2)

    def _quietest(self, low: int, high: int) -> int:
        """Without any silence, the quietest tenth of a second lies between words most likely."""
        part = self._samples[low * FRAME_SAMPLES : high * FRAME_SAMPLES].astype(np.float64)
        energy = np.square(part[: len(part) // FRAME_SAMPLES * FRAME_SAMPLES])
        energy = energy.reshape(-1, FRAME_SAMPLES).sum(axis=1)
        smooth = np.convolve(energy, np.ones(3), mode="same")
        # The ends lack a neighbour and would look quiet.
        return low + 1 + int(np.argmin(smooth[1:-1])) if len(smooth) > 2 else high

    def _chunk(self, speech: np.ndarray, kept: np.ndarray) -> Chunk:
        starts = np.concatenate([[0], np.cumsum(kept)]) / FRAMES_PER_SECOND
        parts, pieces = [], []
        for start, end in runs(kept):
            part = self._samples[start * FRAME_SAMPLES : end * FRAME_SAMPLES]
            parts.append(part)
            source = (self._origin + start) / FRAMES_PER_SECOND
            pieces.append(Piece(float(starts[start]), source, len(part) / SAMPLE_RATE))
        chunk = Chunk(
            self._made,
            np.concatenate(parts),
            tuple(pieces),
            tuple((float(starts[start]), float(starts[end])) for start, end in runs(speech)),
        )
        self._made += 1
        return chunk

    def _drop(self, frames: int) -> None:
        self._samples = self._samples[frames * FRAME_SAMPLES :].copy()
        self._probabilities = self._probabilities[frames:].copy()
        self._origin += frames


def shorten_silence(speech: np.ndarray, options: ChunkOptions) -> np.ndarray:
    """Which frames stay when silences longer than `max_silence_s` are shortened; bool[frames]."""
    kept = np.ones(len(speech), bool)
    padding = _frames(options.padding_s)
    for start, end in runs(~speech):
        if end - start > _frames(options.max_silence_s):
            first = start + padding if start else 0
            last = end - padding if end < len(speech) else end
            kept[first:last] = False
    return kept


def _frames(seconds: float) -> int:
    return round(seconds * FRAMES_PER_SECOND)
