"""Captions as sentences: each has its own line, and its own translation session."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from speech.agreement import ends_sentence

MOST_WORDS = 60
"""A sentence that is longer ends here: recognisers may write no full stops at all."""


@dataclass(frozen=True)
class Sentence:
    """A sentence that is being spoken, or was.

    Attributes:
        index: its number, from 0.
        committed: text that will not change.
        unstable: what follows it for now.
        final: whether it is complete, with nothing unstable.
    """

    index: int
    committed: str
    unstable: str = ""
    final: bool = False

    @property
    def text(self) -> str:
        """All of it."""
        return self.committed + self.unstable


class Sentences:
    """Divides words into sentences as they come."""

    def __init__(self) -> None:
        self._open: list[str] = []  # committed words of the sentence that is not complete
        self._shown: dict[int, Sentence] = {}  # not final, by index
        self._next = 0

    def update(self, committed: Sequence[str], unstable: Sequence[str]) -> list[Sentence]:
        """Take words that are committed now, and all that are unstable.

        A committed sentence is final where its last word ends it and the next one does not go on
        in small letters.

        Args:
            committed, unstable: words with the space before each.

        Returns:
            The sentences that changed, in order; one without text is no longer there.
        """
        settled = [*self._open, *committed]
        words = [*settled, *unstable]
        ends = [end for end in range(1, len(words) + 1) if end == len(words) or _breaks(words, end)]
        found: list[Sentence] = []
        for start, end in itertools.pairwise(_spread([0, *ends])):
            fixed = "".join(words[start : min(end, len(settled))])
            loose = "".join(words[max(start, len(settled)) : end])
            complete = end - start == MOST_WORDS or _breaks(words, end)
            final = complete and end <= len(settled)
            found.append(_sentence(self._next + len(found), fixed, loose, final))
            if final:
                self._open = settled[end:]
        if not any(sentence.final for sentence in found):
            self._open = settled
        return self._changed(found)

    def end(self) -> list[Sentence]:
        """No more words will come; what was unstable is dropped. Returns what changed."""
        found = [_sentence(self._next, "".join(self._open), "", True)] if self._open else []
        self._open = []
        return self._changed(found)

    def _changed(self, found: Sequence[Sentence]) -> list[Sentence]:
        changed = [s for s in found if self._shown.get(s.index) != s]
        there = {sentence.index for sentence in found}
        changed += [Sentence(index, "") for index in self._shown if index not in there]
        self._next += sum(sentence.final for sentence in found)
        self._shown = {s.index: s for s in found if not s.final}
        return changed


def _breaks(words: Sequence[str], end: int) -> bool:
    """Whether a sentence ends before words[end]."""
    if not ends_sentence(words[end - 1]):
        return False
    following = words[end].strip() if end < len(words) else ""
    return not following[:1].islower()


def _spread(ends: Sequence[int]) -> list[int]:
    """Places where sentences end, and more where two are further apart than the longest one."""
    places = [ends[0]]
    for end in ends[1:]:
        places += [*range(places[-1] + MOST_WORDS, end, MOST_WORDS), end]
    return places


def _sentence(index: int, committed: str, unstable: str, final: bool) -> Sentence:
    if committed:
        return Sentence(index, committed.lstrip(), unstable, final)
    return Sentence(index, "", unstable.lstrip(), final)
