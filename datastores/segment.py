"""Sub-indices: a token array with its suffix array, never changed once made."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .suffix_array import merge_suffix_arrays, suffix_sort, token_dtype

_MERGE_STEPS = 1 << 16


@dataclass(frozen=True, eq=False)
class Segment:
    """One sub-index. eq is identity: two segments are never compared by content."""

    tokens: np.ndarray
    """uint16 or uint32[n]: documents, each closed by the separator. May be memory-mapped."""
    suffixes: np.ndarray
    """int32[n - documents]: the suffix array (suffix_array.py). May be memory-mapped."""
    documents: int
    """How many documents there are."""

    @property
    def num_tokens(self) -> int:
        """Tokens, without separators."""
        return self.suffixes.size

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.suffixes.nbytes


@dataclass(frozen=True, eq=False)
class Snapshot:
    """An unchanging view of all that is searchable; holding it keeps its arrays alive."""

    segments: tuple[Segment, ...]
    separator: int

    @cached_property
    def table(self) -> np.ndarray:
        """int64[segments, 4]: address and size of the tokens, then of the suffix array."""
        rows = [
            (s.tokens.ctypes.data, s.tokens.size, s.suffixes.ctypes.data, s.suffixes.size)
            for s in self.segments
        ]
        return np.array(rows, np.int64).reshape(len(rows), 4)

    @cached_property
    def no_tokens(self) -> np.ndarray:
        """Empty array of the token dtype, for which compiled code is specialised."""
        return np.empty(0, token_dtype(self.separator))


def build_segment(documents: Sequence[np.ndarray], vocab_size: int) -> Segment:
    """Sorts documents (integer arrays of ids below vocab_size, none of them empty)."""
    tokens = np.empty(sum(d.size + 1 for d in documents), token_dtype(vocab_size))
    end = 0
    for document in documents:
        tokens[end : end + document.size] = document
        end += document.size + 1
        tokens[end - 1] = vocab_size
    return Segment(tokens, suffix_sort(tokens, vocab_size), len(documents))


def build_segments(
    documents: Iterable[np.ndarray], vocab_size: int, segment_tokens: int
) -> Iterator[Segment]:
    """Segments of at most segment_tokens tokens each, from documents that are no longer."""
    group: list[np.ndarray] = []
    size = 0
    for document in documents:
        if group and size + document.size > segment_tokens:
            yield build_segment(group, vocab_size)
            group, size = [], 0
        group.append(document)
        size += document.size
    if group:
        yield build_segment(group, vocab_size)


def merge_in_slices(older: Segment, newer: Segment, separator: int) -> Iterator[Segment | None]:
    """Merges two segments in slices of a few milliseconds: None after each, at last the result."""
    tokens = np.concatenate((older.tokens, newer.tokens))
    merged = np.empty(older.num_tokens + newer.num_tokens, np.int32)
    done = np.zeros(2, np.int64)
    offset = older.tokens.size
    while not merge_suffix_arrays(
        tokens, older.suffixes, newer.suffixes, offset, separator, merged, done, _MERGE_STEPS
    ):
        yield None
    yield Segment(tokens, merged, older.documents + newer.documents)


def merge(older: Segment, newer: Segment, separator: int) -> Segment:
    """Merges two segments at once."""
    return next(filter(None, merge_in_slices(older, newer, separator)))


def split_document(tokens: np.ndarray, segment_tokens: int) -> list[np.ndarray]:
    """The document in pieces that fit a segment; nearly always it fits whole."""
    return [tokens[i : i + segment_tokens] for i in range(0, tokens.size, segment_tokens)]
