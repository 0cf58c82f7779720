"""AlignAtt: a word is settled once it attends to audio that has passed.

After Papi et al. 2023, "AlignAtt: Using Attention-based Audio-Translation Alignments as a Guide for
Simultaneous Speech Translation", section 3; with Whisper: Macháček and Polák 2025, "Simultaneous
Translation with Offline Speech and LLM Models in CUNI Submission to IWSLT 2025" (SimulStreaming).

The decoder's cross-attention tells from which frame of the encoder a token was written. Where that
frame is among the last ones of the audio so far, the token was written from what is still being
said, and may change; it and all behind it wait. A hypothesis is enough, where LocalAgreement-2
needs two.

How many frames lie behind a word is one number in the papers. Here it is a part of it, by what
tells whether the word will change: whether the recogniser is sure of it, whether the hypothesis
before had it too, and whether more audio made it less likely. The parts were fitted to the
hypotheses of 408 streams (whisper-base, 17 clips in five audio formats, some on a busy machine): of
those with about the same display delays, they settle the fewest words that the last hypothesis has
otherwise.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

from speech.agreement import CommitPolicy, Evidence, agreed_prefix
from speech.chunks import FRAME_S
from speech.hypotheses import REWIND_S, is_sure

# Parts of AlignAtt's frames, of words that the recogniser is sure of, is not sure of, and of which
# it does not say.
_NEW = {True: 0.5, False: 3.5, None: 1.0}
_AGREED = {True: 0.0, False: 1.25, None: 0.5}
# An agreed word whose log probability fell by _FALL, and to less than _DOUBTFUL.
_FALLEN, _FALL, _DOUBTFUL = 2.0, 0.2, -0.3
# A hypothesis' last word, agreed or not, may be the beginning of a longer one.
_LAST = {True: 2.0, False: 2.5}
# Whisper mishears the beginning of what it has heard little of, in seconds.
_EARLY, _EARLY_S = 1.5, 1.3


class AlignAtt(CommitPolicy):
    """Commits words as long as each attends to a place that lies behind the end of the audio.

    Args:
        frames: of the encoder, of 20 ms; parts of so many must have been heard behind the place.

    Raises:
        ValueError: fewer than 0.
    """

    guided: ClassVar[bool] = True

    def __init__(self, frames: int) -> None:
        super().__init__()
        if frames < 0:
            raise ValueError(f"AlignAtt holds back 0 frames or more, got {frames}")
        self._frames = frames
        # The last hypothesis' words behind the committed ones, and what was known of them.
        self._tail: list[str] = []
        self._known: Sequence[Evidence] = ()

    def _settled(self, tail: list[str], evidence: Sequence[Evidence], seconds: float) -> int:
        agreed = agreed_prefix(self._tail, tail)
        settled, nearest = 0, math.inf
        for place, word in enumerate(evidence):
            if word.behind is None:
                continue  # it is settled with the next word that is known
            before = self._known[place] if place < agreed else None
            part = _part(word, before, place == len(tail) - 1, seconds)
            # Nor is it a rewind before the others' places.
            heard = round(word.behind / FRAME_S)
            if heard < int(part * self._frames) or word.behind > nearest + REWIND_S:
                break
            settled, nearest = place + 1, min(nearest, word.behind)
        self._tail, self._known = tail[settled:], evidence[settled:]
        return settled


def _part(word: Evidence, before: Evidence | None, last: bool, seconds: float) -> float:
    """The part of the frames that lies behind a word.

    Args:
        before: what the last hypothesis knew of it; None: it did not have it.
        last: whether the hypothesis ends with it.
        seconds: of audio in the stretch.
    """
    if before is None:
        part = _NEW[_sure(word.logprob)]
    else:
        part = _agreed_part(word.logprob, before.logprob)
    if last:
        part = max(part, _LAST[before is not None])
    return max(part, _EARLY) if seconds < _EARLY_S else part


def _agreed_part(now: float | None, before: float | None) -> float:
    """The part of the frames for a word that two hypotheses have, by its log probabilities."""
    if now is not None and before is not None and now < min(before - _FALL, _DOUBTFUL):
        return _FALLEN
    return _AGREED[_sure(now)]


def _sure(logprob: float | None) -> bool | None:
    return None if logprob is None else is_sure(logprob)
