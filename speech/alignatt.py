"""AlignAtt: a word is settled once it attends to audio that has passed.

After Papi et al. 2023, "AlignAtt: Using Attention-based Audio-Translation Alignments as a Guide for
Simultaneous Speech Translation", section 3; with Whisper: Macháček and Polák 2025, "Simultaneous
Translation with Offline Speech and LLM Models in CUNI Submission to IWSLT 2025" (SimulStreaming).

The decoder's cross-attention tells from which frame of the encoder a token was written. Where that
frame is among the last ones of the audio so far, the token was written from what is still being
said, and may change; it and all behind it wait. A hypothesis is enough, where LocalAgreement-2
needs two; where a second one says the same, a word waits for less (not in the papers).
"""

import math
from typing import ClassVar

from speech.agreement import CommitPolicy, agreed_prefix
from speech.chunks import FRAME_S
from speech.hypotheses import REWIND_S

# A hypothesis' last word may be the beginning of a longer one: so many more frames lie behind it
# (SimulStreaming leaves it out altogether).
_LAST_FRAMES = 25
# A word that the recogniser is not sure of changes more often, in the next hypothesis as well.
_UNSURE = 3


class AlignAtt(CommitPolicy):
    """Commits words as long as each attends to a place that lies behind the end of the audio.

    A word that two successive hypotheses agree on waits for half as many frames, one that the
    recogniser is not sure of for three times as many (neither is in the papers).

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
        self._tail: list[str] = []  # the last hypothesis's words behind the committed ones

    def _settled(self, tail: list[str], behind: list[float | None], sure: list[bool]) -> int:
        agreed = agreed_prefix(self._tail, tail)
        settled, nearest = 0, math.inf
        for place, (seconds, certain) in enumerate(zip(behind, sure, strict=True)):
            if seconds is None:
                continue  # it is settled with the next word that is known
            last = place == len(tail) - 1
            least = self._least(place < agreed, certain, last)
            # Nor is it a rewind before the others' places.
            if round(seconds / FRAME_S) < least or seconds > nearest + REWIND_S:
                break
            settled, nearest = place + 1, min(nearest, seconds)
        self._tail = tail[settled:]
        return settled

    def _least(self, agreed: bool, certain: bool, last: bool) -> int:
        """So many frames at least lie behind a word."""
        frames = self._frames if certain else self._frames * _UNSURE
        if agreed:
            return frames // 2
        return max(frames, self._frames + _LAST_FRAMES) if last else frames
