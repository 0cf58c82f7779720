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

# A word that attends to a place so far before an earlier one was not written from the audio:
# invented text looks back (SimulStreaming's rewind_threshold, which is 4 s).
_REWIND_S = 1.0


class AlignAtt(CommitPolicy):
    """Commits words as long as each attends to a place that lies behind the end of the audio.

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

    def _settled(self, tail: list[str], behind: list[float | None]) -> int:
        nearest = math.inf
        for count, seconds in enumerate(behind):
            if seconds is None or round(seconds / FRAME_S) < self._frames:
                return count
            if seconds > nearest + _REWIND_S:
                return count
            nearest = min(nearest, seconds)
        return len(behind)
