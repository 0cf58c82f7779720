"""AlignAtt: a word is settled once it attends to audio that has passed.

After Papi et al. 2023, "AlignAtt: Using Attention-based Audio-Translation Alignments as a Guide for
Simultaneous Speech Translation", section 3; with Whisper: Macháček and Polák 2025, "Simultaneous
Translation with Offline Speech and LLM Models in CUNI Submission to IWSLT 2025" (SimulStreaming).

The decoder's cross-attention tells from which frame of the encoder a token was written. Where that
frame is among the last ones of the audio so far, the token was written from what is still being
said, and may change; it and all behind it wait. A hypothesis is enough, where LocalAgreement-2
needs two.
"""

import math
from typing import ClassVar

from speech.agreement import CommitPolicy
from speech.chunks import FRAME_S
from speech.hypotheses import REWIND_S

# A hypothesis' last word may be the beginning of a longer one: so many more frames lie behind it
# (SimulStreaming leaves it out altogether), and behind one that is not sure.
_WAIT_FRAMES = 25


class AlignAtt(CommitPolicy):
    """Commits words as long as each attends to a place that lies behind the end of the audio.

    A word that the recogniser is not sure of waits until it was heard with care (not in the
    papers).

    Args:
        frames: of the encoder, at least so many must have been heard behind the place.

    Raises:
        ValueError: fewer than 0.
    """

    guided: ClassVar[bool] = True

    def __init__(self, frames: int) -> None:
        super().__init__()
        if frames < 0:
            raise ValueError(f"AlignAtt holds back 0 frames or more, got {frames}")
        self._frames = frames

    def _settled(
        self, tail: list[str], behind: list[float | None], sure: list[bool], careful: bool
    ) -> int:
        settled, nearest, self.doubts = 0, math.inf, False
        for place, (seconds, certain) in enumerate(zip(behind, sure, strict=True)):
            last = place == len(tail) - 1
            waits = last or (careful and not certain)
            if seconds is not None and not self._passed(seconds, waits, nearest):
                break
            if not (certain or careful):
                self.doubts = not last
                break
            if seconds is not None:  # else it is settled with the next word that is known
                settled, nearest = place + 1, min(nearest, seconds)
        return settled

    def _passed(self, seconds: float, waits: bool, nearest: float) -> bool:
        """Whether a word's place lies far enough behind, and not a rewind before the others'."""
        least = self._frames + (_WAIT_FRAMES if waits else 0)
        return round(seconds / FRAME_S) >= least and seconds <= nearest + REWIND_S
