"""Audio that is not settled yet, with its speech probabilities."""

from typing import Protocol

import numpy as np

from speech.vad import FRAME_SAMPLES, speech_mask


class SpeechProbabilities(Protocol):
    """What tells speech from silence, as speech.vad.SpeechStream does."""

    def push(self, samples: np.ndarray, last: bool = False) -> np.ndarray:
        """float32[frames]: the probabilities of the frames that `samples` complete."""
        ...


class AudioBuffer:
    """Samples that are not settled, and the speech probability of their frames of 32 ms."""

    def __init__(self, detector: SpeechProbabilities):
        self._detector = detector
        self._samples = np.empty(0, np.float32)
        self._probabilities = np.empty(0, np.float32)
        self.origin = 0
        """Frames that came before."""

    @property
    def frames(self) -> int:
        """Whole frames that are there."""
        return len(self._probabilities)

    @property
    def end(self) -> int:
        """Whole frames of the audio so far."""
        return self.origin + self.frames

    def push(self, samples: np.ndarray, last: bool = False) -> None:
        """Take the next samples, float32[n] at 16 kHz.

        Args:
            last: none come after them; the last frame is filled up.
        """
        probabilities = self._detector.push(samples, last)
        self._samples = np.concatenate([self._samples, samples])
        self._probabilities = np.concatenate([self._probabilities, probabilities])

    @property
    def probabilities(self) -> np.ndarray:
        """Of speech, float32[frames]."""
        return self._probabilities

    def speech(self, threshold: float) -> np.ndarray:
        """Which frames are speech, bool[frames]."""
        return speech_mask(self._probabilities, threshold)

    def first(self, frames: int) -> np.ndarray:
        """The samples of the first frames, float32[n]."""
        return self._samples[: frames * FRAME_SAMPLES]

    def quietest(self, low: int, high: int) -> int:
        """The quietest of the frames from `low` to `high`, with the ones beside it."""
        energy = np.square(self.first(high)[low * FRAME_SAMPLES :], dtype=np.float64)
        smooth = np.convolve(energy.reshape(-1, FRAME_SAMPLES).sum(axis=1), np.ones(3), "valid")
        return low + 1 + int(np.argmin(smooth))

    def drop(self, frames: int) -> int:
        """Drop the first frames; returns how many."""
        frames = min(max(frames, 0), self.frames)
        self._samples = self._samples[frames * FRAME_SAMPLES :].copy()
        self._probabilities = self._probabilities[frames:].copy()
        self.origin += frames
        return frames
