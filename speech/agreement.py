"""Which words of growing audio's hypotheses are settled: policies, and words that agree.

A policy sees each hypothesis of the whole stretch and commits words of it, from the beginning on;
`speech/alignatt.py` has another one.

LocalAgreement-2 commits the longest common prefix of two successive hypotheses (Liu et al. 2020,
"Low-Latency Sequence-to-Sequence Speech Recognition and Translation by Partial Hypothesis
Selection", section 3.1; for Whisper: Macháček et al. 2023, "Turning Whisper into Real-Time
Transcription System", section 2.1). Macháček et al. find the committed words in a new hypothesis
by their times; here they are aligned by edit distance, so that no word times are needed.
"""

import math
import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

# Thai and Lao, Burmese, Khmer, kana, Han: written without spaces, so each character is a word.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
# Marks and punctuation belong to the character before them.
_WORD = re.compile(rf"\s*(?:[{_UNSPACED}][^\w\s]*|[^\s{_UNSPACED}]+)")
_STARTS_UNSPACED = re.compile(rf"\s|[{_UNSPACED}]")

# Whisper writes "..." where speech breaks off, which is no end.
_SENTENCE_END = re.compile("(?:^|[^.])[.!?。\uff01\uff1f؟।][\"'”\u2019»)\\]]*$")
_ABBREVIATION = re.compile(r"(?:[^\W\d]\.)+|(?:mr|mrs|ms|dr|st|prof|jr|sr|vs|gen|sen|rep)\.", re.I)


def space_before(text: str) -> str:
    """The space between what was said and this text behind it: none where its script has none."""
    return "" if not text or _STARTS_UNSPACED.match(text) else " "


def split_words(text: str) -> list[str]:
    """The words of a text, each with the white space before it; a first one gets a space, too.

    Where a script has no spaces, a word is a character with its marks and punctuation.
    """
    text = space_before(text) + text
    return _WORD.findall(text)


def same_word(word: str, other: str) -> bool:
    """Whether two words differ in case, punctuation and white space at most."""
    return _key(word) == _key(other)


def ends_sentence(word: str) -> bool:
    """Whether a word ends with a full stop, question or exclamation mark that ends a sentence."""
    word = word.strip()
    return bool(_SENTENCE_END.search(word)) and not _ABBREVIATION.fullmatch(word)


def aligned_prefix(wanted: Sequence[str], given: Sequence[str]) -> int:
    """How many of `given`'s first items stand for all of `wanted`.

    It is the prefix of the least edit distance (Levenshtein) to `wanted`; of several, one with the
    same last item, then the one nearest to it in length.
    """
    row = list(range(len(given) + 1))
    for i, item in enumerate(wanted):
        above, row = row, [i + 1]
        for j, other in enumerate(given):
            row.append(min(above[j] + (item != other), above[j + 1] + 1, row[j] + 1))

    def rank(j: int) -> tuple[int, bool, int]:
        return row[j], list(given[j - 1 : j]) != list(wanted[-1:]), abs(j - len(wanted))

    return min(range(len(row)), key=rank)


class Evidence(NamedTuple):
    """What is known of a word of a hypothesis besides its text.

    Attributes:
        behind: seconds of audio that were heard behind the place which it attends to; None: it is
            not known.
        logprob: log probability, natural; None: it is not known.
    """

    behind: float | None = None
    logprob: float | None = None


class CommitPolicy(ABC):
    """Decides what is settled, over the hypotheses of one stretch of audio that grows at its end.

    What was committed once is found in later hypotheses by edit distance, and stays.
    """

    guided: ClassVar[bool] = False
    """Whether hypotheses must say how far into the audio their words look."""

    def __init__(self) -> None:
        self._committed: list[str] = []  # keys of the words, as they were committed

    def hear(
        self,
        words: Sequence[str],
        last: bool = False,
        evidence: Sequence[Evidence] = (),
        seconds: float = math.inf,
    ) -> tuple[int, int]:
        """Take the next hypothesis.

        Args:
            words: of the whole stretch, from its beginning.
            last: no other hypothesis of it will come: all of it is committed.
            evidence: for each word, what else is known of it; no list: nothing.
            seconds: of audio in the stretch; inf: it is not known.

        Returns:
            first, end: words[first:end] are committed now; the ones from `end` on are unstable.
        """
        keys = [_key(word) for word in words]
        first = aligned_prefix(self._committed, keys)
        tail = list(words[first:])
        known = list(evidence[first:]) or [Evidence()] * len(tail)
        count = len(tail) if last else self._settled(tail, known, seconds)
        self._committed += keys[first : first + count]
        return first, first + count

    def forget(self, words: Sequence[str]) -> None:
        """The stretch begins later from now on: behind `words`, the last hypothesis's first ones.

        They must have been committed.
        """
        del self._committed[: aligned_prefix([_key(word) for word in words], self._committed)]

    @abstractmethod
    def _settled(self, tail: list[str], evidence: Sequence[Evidence], seconds: float) -> int:
        """How many of the words behind the committed ones are committed now.

        Args:
            tail: those words.
            evidence: of each of them.
            seconds: as in `hear`.
        """


class LocalAgreement(CommitPolicy):
    """LocalAgreement-2: what two successive hypotheses agree on."""

    def __init__(self) -> None:
        super().__init__()
        self._tail: list[str] = []  # the last hypothesis's words behind the committed ones

    def _settled(self, tail: list[str], evidence: Sequence[Evidence], seconds: float) -> int:
        agreed = agreed_prefix(self._tail, tail)
        self._tail = tail[agreed:]
        return agreed


def agreed_prefix(before: Sequence[str], now: Sequence[str]) -> int:
    """How many words two successive hypotheses, or what follows a place in them, begin with
    alike."""
    count = 0
    for a, b in zip(before, now, strict=False):
        if not same_word(a, b):
            break
        count += 1
    # Whisper ends what breaks off with a full stop: a last word counts only as it stands.
    if count and count == len(now) and before[count - 1].strip() != now[-1].strip():
        count -= 1
    return count


def _key(word: str) -> str:
    letters = (c for c in word.casefold() if unicodedata.category(c)[0] in "LMN")
    return "".join(letters) or word.strip()
