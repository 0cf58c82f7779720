"""Sub-indices: a token array with its suffix array, never changed once made."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .columns import SEGMENT_COLUMNS
from .suffix_array import make_landmarks, merge_suffix_arrays, suffix_sort, token_dtype

_MERGE_STEPS = 1 << 16

# One row per document (or piece of one): where it starts in the token array, its number in the
# order of arrival, and the digest of the name under which it can be deleted (zeros: no name).
DOCUMENT_DTYPE = np.dtype([("start", "<u8"), ("number", "<u8"), ("digest", "V16")])
NO_DIGEST = bytes(16)
# Documents are counted below this; a file that has a higher number was not written by us.
NUMBER_LIMIT = 1 << 62
MAX_NAME_BYTES = 512


class Document(NamedTuple):
    """What joins a datastore at once: one finished output, or one text of a corpus."""

    tokens: np.ndarray
    """int32[n], ids below the vocabulary size; not empty."""
    number: int = 0
    """Place in the order of arrival; deletions count only for documents that came before."""
    digest: bytes = NO_DIGEST
    """document_digest() of the name under which it can be deleted."""


@dataclass(frozen=True, eq=False)
class Segment:
    """One sub-index. eq is identity: two segments are never compared by content."""

    tokens: np.ndarray
    """uint16 or uint32[n]: documents, each closed by the separator. May be memory-mapped."""
    suffixes: np.ndarray
    """int32[n - documents]: the suffix array (suffix_array.py). May be memory-mapped."""
    landmarks: np.ndarray
    """uint64: the first tokens of every LANDMARK_EVERY-th suffix (suffix_array.py)."""
    documents: np.ndarray
    """DOCUMENT_DTYPE[documents], by start."""

    @property
    def num_tokens(self) -> int:
        """Tokens, without separators."""
        return self.suffixes.size

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Address and size of tokens, suffixes and landmarks, in the order of columns.py."""
        arrays = (self.tokens, self.suffixes, self.landmarks)
        return tuple(n for array in arrays for n in (array.ctypes.data, array.size))

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.tokens, self.suffixes, self.landmarks, self.documents))


@dataclass(frozen=True, eq=False)
class Snapshot:
    """An unchanging view of what a request may read; holding it keeps its arrays alive."""

    live: tuple[Segment, ...]
    """Served outputs of one namespace, oldest first."""
    static: tuple[Segment, ...]
    """Shared corpora."""
    separator: int

    @property
    def segments(self) -> tuple[Segment, ...]:
        return (*self.static, *self.live)

    @cached_property
    def table(self) -> np.ndarray:
        """int64[segments, SEGMENT_COLUMNS]: a sub-index each, as columns.py names it."""
        rows = [(*s.addresses, i >= len(self.static)) for i, s in enumerate(self.segments)]
        return np.array(rows, np.int64).reshape(len(rows), SEGMENT_COLUMNS)


def document_digest(name: str) -> bytes:
    """16 bytes that stand for a document's name (a request id) in segments and logs."""
    # A client's request id may hold what UTF-8 cannot: half a surrogate pair.
    encoded = name.encode(errors="surrogatepass")
    return hashlib.blake2b(encoded, digest_size=16).digest() if name else NO_DIGEST


def build_segment(documents: Sequence[Document], vocab_size: int) -> Segment:
    """Sorts documents."""
    tokens = np.empty(sum(d.tokens.size + 1 for d in documents), token_dtype(vocab_size))
    rows = np.empty(len(documents), DOCUMENT_DTYPE)
    end = 0
    for row, document in enumerate(documents):
        rows[row] = end, document.number, document.digest
        tokens[end : end + document.tokens.size] = document.tokens
        end += document.tokens.size + 1
        tokens[end - 1] = vocab_size
    suffixes = suffix_sort(tokens, vocab_size)
    return Segment(tokens, suffixes, make_landmarks(tokens, suffixes, vocab_size), rows)


def build_segments(
    documents: Iterable[Document], vocab_size: int, segment_tokens: int
) -> Iterator[Segment]:
    """Segments of at most segment_tokens tokens each; longer documents are split."""
    group: list[Document] = []
    size = 0
    for document in documents:
        for piece in split_document(document, segment_tokens):
            if group and size + piece.tokens.size > segment_tokens:
                yield build_segment(group, vocab_size)
                group, size = [], 0
            group.append(piece)
            size += piece.tokens.size
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
    moved = newer.documents.copy()
    moved["start"] += np.uint64(offset)
    documents = np.concatenate((older.documents, moved))
    yield Segment(tokens, merged, make_landmarks(tokens, merged, separator), documents)


def merge(older: Segment, newer: Segment, separator: int) -> Segment:
    """Merges two segments at once."""
    return next(filter(None, merge_in_slices(older, newer, separator)))


def documents_of(segment: Segment) -> Iterator[Document]:
    """The documents of a segment, oldest first."""
    lengths = document_lengths(segment)
    for row, length in zip(segment.documents, lengths, strict=True):
        start = int(row["start"])
        tokens = segment.tokens[start : start + int(length) - 1].astype(np.int32)
        yield Document(tokens, int(row["number"]), bytes(row["digest"]))


def document_lengths(segment: Segment) -> np.ndarray:
    """int64[documents]: tokens of each document, its separator included."""
    return np.diff(segment.documents["start"].astype(np.int64), append=segment.tokens.size)


def without_documents(segment: Segment, gone: np.ndarray, separator: int) -> Segment | None:
    """The segment without the documents where gone (bool[documents]) is true; None: all gone.

    The order of what stays is the order it had: nothing is sorted again.
    """
    if not gone.any():
        return segment
    if gone.all():
        return None
    lengths = document_lengths(segment)
    stays = np.repeat(~gone, lengths)
    tokens = segment.tokens[stays]
    shift = np.repeat(np.cumsum(np.where(gone, lengths, 0)), lengths).astype(np.int32)
    suffixes = segment.suffixes[stays[segment.suffixes]]
    suffixes = suffixes - shift[suffixes]
    documents = segment.documents[~gone].copy()
    documents["start"] = np.cumsum(np.append(0, lengths[~gone][:-1]))
    return Segment(tokens, suffixes, make_landmarks(tokens, suffixes, separator), documents)


def split_document(document: Document, segment_tokens: int) -> list[Document]:
    """The document in pieces that fit a segment; nearly always it fits whole."""
    tokens = document.tokens
    if tokens.size <= segment_tokens:
        return [document]
    starts = range(0, tokens.size, segment_tokens)
    return [document._replace(tokens=tokens[i : i + segment_tokens]) for i in starts]
