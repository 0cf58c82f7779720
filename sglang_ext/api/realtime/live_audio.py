"""The audio of a session, as it comes: frames of 32 ms with their speech probabilities."""

from dataclasses import dataclass, field

import numpy as np

from speech.buffer import SpeechProbabilities
from speech.vad import FRAME_SAMPLES
from speech.wire_audio import WireDecoder, WireFormat

_NOTHING = np.empty(0, np.float32)


@dataclass(frozen=True)
class Frames:
    """Consecutive frames.

    Attributes:
        samples: float32[frames * FRAME_SAMPLES] at 16 kHz.
        probabilities: float32[frames] of speech.
    """

    samples: np.ndarray = field(default_factory=lambda: _NOTHING)
    probabilities: np.ndarray = field(default_factory=lambda: _NOTHING)

    def __len__(self) -> int:
        return len(self.probabilities)

    def __add__(self, other: "Frames") -> "Frames":
        return Frames(
            np.concatenate([self.samples, other.samples]),
            np.concatenate([self.probabilities, other.probabilities]),
        )

    def part(self, first: int, last: int | None = None) -> "Frames":
        """The frames from `first` up to `last`."""
        end = len(self) if last is None else last
        return Frames(
            self.samples[first * FRAME_SAMPLES : end * FRAME_SAMPLES],
            self.probabilities[first:end],
        )


class AudioFront:
    """Wire audio -> frames. One call at a time, in any thread.

    Args:
        detector: of the whole session's audio.
    """

    def __init__(self, detector: SpeechProbabilities, wire: WireFormat):
        self._detector = detector
        self._decoder = WireDecoder(wire)
        self._rest = _NOTHING

    def set_format(self, wire: WireFormat) -> None:
        """What comes from now on is written otherwise."""
        self._decoder = WireDecoder(wire)

    def push(self, data: bytes) -> Frames:
        """The frames that the next bytes complete.

        Raises:
            ValueError: they end within a sample.
        """
        return self._framed(self._decoder.push(data))

    def flush(self) -> Frames:
        """The last frame, filled up with silence."""
        return self._framed(_NOTHING, last=True)

    def _framed(self, samples: np.ndarray, last: bool = False) -> Frames:
        held = np.concatenate([self._rest, samples])
        if last:
            held = np.pad(held, (0, -len(held) % FRAME_SAMPLES))
        probabilities = self._detector.push(samples, last)
        whole = len(probabilities) * FRAME_SAMPLES
        self._rest = held[whole:].copy()
        return Frames(held[:whole], probabilities)


class FrameHistory:
    """Frames that no turn has taken yet."""

    def __init__(self) -> None:
        self._frames = Frames()
        self.origin = 0
        """Number of the first frame that is kept, counted from the session's beginning."""

    @property
    def end(self) -> int:
        """Number of the frame that will come next."""
        return self.origin + len(self._frames)

    def push(self, frames: Frames) -> None:
        """Keep the next frames."""
        self._frames += frames

    def take(self, end: int) -> Frames:
        """The frames before number `end`, which are no longer kept."""
        taken = self._frames.part(0, max(0, end - self.origin))
        self.drop(end)
        return taken

    def drop(self, end: int) -> None:
        """No longer keep the frames before number `end`."""
        count = min(max(0, end - self.origin), len(self._frames))
        self._frames = self._frames.part(count)
        self.origin += count


class Given:
    """Speech probabilities that are known already, for speech.streaming's recognizer."""

    def __init__(self) -> None:
        self._next = _NOTHING

    def give(self, probabilities: np.ndarray) -> None:
        """Those of the samples that are pushed next."""
        self._next = probabilities

    def push(self, samples: np.ndarray, last: bool = False) -> np.ndarray:
        """float32[frames]: what was given."""
        given, self._next = self._next, _NOTHING
        return given
