"""What follows a prefix in a datastore: for people who want to see what is in it.

Searched in Python, one sub-index after the other: drafting has the compiled search of search.py.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .config import SORT_DEPTH
from .segment import Segment

# Occurrences of one sub-index that are looked at; of more, so many evenly spread.
_MOST = 1 << 18


@dataclass(frozen=True)
class Continuation:
    """Tokens that follow a prefix."""

    tokens: tuple[int, ...]
    """Fewer than asked for where a document ends."""
    count: int
    sources: dict[str, int]
    """How often by source."""


@dataclass
class Continuations:
    """What was found of a prefix."""

    matched: int
    """So many of its last tokens were found, the most that are; 0: not even the last one."""
    sources: Counter[str] = field(default_factory=Counter)
    """Occurrences by source."""
    found: list[Continuation] = field(default_factory=list)
    """The most frequent first."""
    sampled: bool = False
    """Whether there are so many occurrences that some were not looked at."""


def continuations_of(
    prefix: Sequence[int],
    segments: Iterable[tuple[str, Segment]],
    separator: int,
    length: int,
    most: int,
) -> Continuations:
    """What follows the longest end of a prefix (of 12 tokens at most) that occurs anywhere.

    segments: (source, sub-index) of those to search. separator: the vocabulary size. length: tokens
    of a continuation. most: continuations to give.
    """
    searched = list(segments)
    for size in range(min(len(prefix), SORT_DEPTH), 0, -1):
        query = tuple(prefix[len(prefix) - size :])
        spans = [(source, s, _interval(s, query, separator)) for source, s in searched]
        spans = [(source, s, span) for source, s, span in spans if span[0] < span[1]]
        if spans:
            return _counted(size, spans, separator, length, most)
    return Continuations(0)


def _interval(segment: Segment, query: tuple[int, ...], separator: int) -> tuple[int, int]:
    """suffixes[low:high] begin with the query."""

    def start(position: np.integer) -> tuple[int, ...]:
        tokens = segment.tokens[int(position) : int(position) + len(query)].tolist()
        # The end of a document comes before all tokens.
        return tuple(-1 if token == separator else token for token in tokens)

    low = bisect_left(segment.suffixes, query, key=start)
    return low, bisect_right(segment.suffixes, query, low, key=start)


def _counted(
    size: int,
    spans: Sequence[tuple[str, Segment, tuple[int, int]]],
    separator: int,
    length: int,
    most: int,
) -> Continuations:
    result = Continuations(size)
    counts: Counter[tuple[int, ...]] = Counter()
    by_source: dict[tuple[int, ...], Counter[str]] = {}
    for source, segment, (low, high) in spans:
        result.sources[source] += high - low
        result.sampled |= high - low > _MOST
        looked_at = np.linspace(low, high - 1, min(high - low, _MOST)).astype(np.int64)
        for tokens, count in _rows(segment, looked_at, size, separator, length):
            counts[tokens] += count
            by_source.setdefault(tokens, Counter())[source] += count
    result.found = [
        Continuation(tokens, count, dict(by_source[tokens].most_common()))
        for tokens, count in counts.most_common(most)
    ]
    return result


def _rows(
    segment: Segment, looked_at: np.ndarray, size: int, separator: int, length: int
) -> Iterable[tuple[tuple[int, ...], int]]:
    """(continuation, how often) of these entries of the suffix array."""
    starts = segment.suffixes[looked_at].astype(np.int64) + size
    places = np.minimum(starts[:, None] + np.arange(length), segment.tokens.size - 1)
    tokens = segment.tokens[places].astype(np.int64)
    ended = np.logical_or.accumulate(tokens == separator, axis=1)
    rows, counts = np.unique(np.where(ended, -1, tokens), axis=0, return_counts=True)
    for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
        yield tuple(token for token in row if token >= 0), count
