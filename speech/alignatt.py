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

from speech.agreement import CommitPolicy, same_word
from speech.chunks import FRAME_S
from speech.hypotheses import REWIND_S

# A hypothesis' last word may be the beginning of a longer one: so many more frames lie behind it
# (SimulStreaming leaves it out altogether), and behind one that is not sure.
_WAIT_FRAMES = 25


class AlignAtt(CommitPolicy):
    """Commits words as long as each attends to a place that lies behind the end of the audio.

    A word that the recogniser is not sure of waits for the next hypothesis to say it, too, as in
    LocalAgreement-2 (not in the papers).

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
        settled, nearest = 0, math.inf
        for place, (word, seconds) in enumerate(zip(tail, behind, strict=True)):
            again = place < len(self._tail) and same_word(self._tail[place], word)
            if not (sure[place] or again):
                break
            if seconds is None:
                continue  # settled with the next word whose place is known
            waits = place == len(tail) - 1 or not sure[place]
            least = self._frames + (_WAIT_FRAMES if waits else 0)
            if round(seconds / FRAME_S) < least or seconds > nearest + REWIND_S:
                break
            settled, nearest = place + 1, min(nearest, seconds)
        self._tail = tail[settled:]
        return settled
