"""Where turns of speech begin and end, told while they are spoken: server-side turn detection."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from speech.vad import FRAMES_PER_SECOND

MIN_SPEECH_FRAMES = 4
"""Shorter sounds begin no turn: 0.13 s, the least that speech.vad.speech_mask keeps."""

_BRIDGED_FRAMES = 3  # shorter silences do not part speech, as in speech_mask


@dataclass(frozen=True)
class TurnChange:
    """A turn begins or ends before this frame of 32 ms, counted from the first one pushed."""

    frame: int
    started: bool


class TurnDetector:
    """Finds turns in the speech probabilities of consecutive frames.

    A sound begins where the probability reaches `threshold` and ends where it falls 0.15 below it,
    as in speech.vad.speech_mask.

    Args:
        threshold: least probability of speech, 0 to 1.
        silence_s: so long a silence ends a turn.
        speaking: whether a turn has begun already.
        frame: number of the first frame that will come.
    """

    def __init__(
        self, threshold: float, silence_s: float, speaking: bool = False, frame: int = 0
    ) -> None:
        self._high, self._low = threshold, max(threshold - 0.15, 0.01)
        self._silence = max(1, round(silence_s * FRAMES_PER_SECOND))
        self._frame = frame
        self._sound = False
        self._run = 0  # frames of the sound so far, bridged silences included
        self._gap = 0  # silent frames since its last one
        self._quiet = 0  # frames since speech
        self.speaking = speaking
        """Whether a turn has begun and not ended."""

    def push(self, probabilities: Sequence[float] | np.ndarray) -> list[TurnChange]:
        """Take the next frames; returns the changes in them, in order."""
        changes = [self._step(float(p)) for p in probabilities]
        return [change for change in changes if change is not None]

    def _step(self, probability: float) -> TurnChange | None:
        self._frame += 1
        self._sound = probability >= (self._low if self._sound else self._high)
        if self._sound:
            self._run += self._gap + 1 if self._run else 1
            self._gap = 0
        else:
            self._gap += 1
            self._run = self._run if self._gap <= _BRIDGED_FRAMES else 0
        spoken = self._sound and self._run >= MIN_SPEECH_FRAMES
        self._quiet = 0 if spoken else self._quiet + 1
        if spoken and not self.speaking:
            self.speaking = True
            return TurnChange(self._frame - self._run, True)
        # Not within a sound, which may yet be speech.
        if self.speaking and not self._sound and self._quiet >= self._silence:
            self.speaking = False
            return TurnChange(self._frame, False)
        return None
