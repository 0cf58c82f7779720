"""Suffix arrays against naive substring counts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastores.config import SORT_DEPTH
from datastores.search import LENGTHS_AT_ONCE, SEARCH_COLUMNS, find_intervals, search_rows
from datastores.segment import Document, Segment, Snapshot, build_segment, merge_in_slices
from datastores.suffix_array import LANDMARK_EVERY, suffix_sort, token_dtype, tokens_per_key

# One vocabulary per packing: tiny ids, uint16, uint32 with 3 and with 2 tokens per sort key.
VOCAB_SIZES = (3, 49_152, 200_000, 1 << 30)
documents_of_two_ids = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=40), min_size=1, max_size=6
)


def segment_of(documents: list[list[int]], vocab_size: int) -> Segment:
    return build_segment([Document(np.array(d, np.int32)) for d in documents], vocab_size)


def naive_order(segment: Segment, separator: int) -> list[int]:
    """Positions by what follows them, no further than the document or SORT_DEPTH."""
    tokens = segment.tokens.tolist()

    def suffix(position: int) -> list[int]:
        end = tokens.index(separator, position)
        return tokens[position : min(end, position + SORT_DEPTH)]

    positions = [p for p, token in enumerate(tokens) if token != separator]
    return sorted(positions, key=lambda p: (suffix(p), p))


def naive_count(documents: list[list[int]], query: list[int]) -> int:
    return sum(
        document[i : i + len(query)] == query
        for document in documents
        for i in range(len(document) - len(query) + 1)
    )


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@settings(max_examples=60, deadline=None)
@given(documents=documents_of_two_ids)
def test_order_is_that_of_sorted_suffixes(vocab_size: int, documents: list[list[int]]) -> None:
    # 1 becomes the largest id, next to the separator.
    documents = [[t * (vocab_size - 1) for t in d] for d in documents]
    segment = segment_of(documents, vocab_size)
    assert segment.tokens.dtype == token_dtype(vocab_size)
    assert segment.suffixes.tolist() == naive_order(segment, vocab_size)


def intervals_of(segments: list[Segment], query: list[int], vocab_size: int) -> np.ndarray:
    """int64[len(query), len(segments), 2], for each of query[start:]."""
    snapshot = Snapshot((), tuple(segments), vocab_size)
    tokens = np.array(query, np.int32)
    intervals = np.full((len(query), len(segments), 2), -1, np.int64)
    searches = np.empty((search_rows(len(segments)), SEARCH_COLUMNS), np.int64)
    for first in range(0, len(query), LENGTHS_AT_ONCE):
        find_intervals(
            snapshot.table.ctypes.data, len(segments), tokens.ctypes.data, len(query),
            first, min(first + LENGTHS_AT_ONCE, len(query)), vocab_size,
            *tokens_per_key(vocab_size), token_dtype(vocab_size)(0),
            intervals.ctypes.data, searches.ctypes.data,
        )  # fmt: skip
    return intervals


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@settings(max_examples=60, deadline=None)
@given(
    documents=documents_of_two_ids,
    others=documents_of_two_ids,
    copies=st.sampled_from([1, 7, 150]),
    query=st.lists(st.integers(0, 2), min_size=1, max_size=SORT_DEPTH),
)
def test_intervals_hold_every_occurrence_and_no_other(
    vocab_size: int,
    documents: list[list[int]],
    others: list[list[int]],
    copies: int,
    query: list[int],
) -> None:
    """Few landmarks and many, and many that are equal."""
    ids = (1, vocab_size - 1, 0)
    corpora = [[[ids[t] for t in d] for d in c] * copies for c in (documents, others)]
    query = [ids[t] for t in query]
    segments = [segment_of(corpus, vocab_size) for corpus in corpora]
    intervals = intervals_of(segments, query, vocab_size)
    for start in range(len(query)):
        for s, segment in enumerate(segments):
            low, high = intervals[start, s].tolist()
            assert high - low == naive_count(corpora[s], query[start:])
            for position in segment.suffixes[low:high:17]:
                found = segment.tokens[position : position + len(query) - start]
                assert found.tolist() == query[start:]


def test_intervals_among_many_landmarks() -> None:
    """More landmarks than fit the last steps of their search, on a text like a language."""
    rng = np.random.default_rng(3)
    vocab_size = 300
    tokens = (vocab_size * rng.random(150_000) ** 4).astype(np.int32)
    segment = build_segment([Document(tokens)], vocab_size)
    assert segment.landmarks.size > 16 * LANDMARK_EVERY
    for _ in range(300):
        at = int(rng.integers(tokens.size - 8))
        query = tokens[at : at + 8].tolist()
        if rng.random() < 0.3:
            query[int(rng.integers(8))] = int(rng.integers(vocab_size))
        intervals = intervals_of([segment], query, vocab_size)
        alike = np.ones(tokens.size, np.bool_)  # positions where query[start:] ends
        for start in reversed(range(8)):
            alike[: 7 - start] = False
            back = 7 - start
            alike[back:] &= tokens[: tokens.size - back] == query[start]
            assert intervals[start, 0, 1] - intervals[start, 0, 0] == np.count_nonzero(alike)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@settings(max_examples=60, deadline=None)
@given(older=documents_of_two_ids, newer=documents_of_two_ids)
def test_merging_equals_sorting_all(
    vocab_size: int, older: list[list[int]], newer: list[list[int]]
) -> None:
    *_, merged = merge_in_slices(
        segment_of(older, vocab_size), segment_of(newer, vocab_size), vocab_size
    )
    whole = segment_of(older + newer, vocab_size)
    assert merged is not None
    np.testing.assert_array_equal(merged.tokens, whole.tokens)
    np.testing.assert_array_equal(merged.suffixes, whole.suffixes)
    assert merged.documents.size == len(older) + len(newer)


def test_merge_yields_between_slices() -> None:
    rng = np.random.default_rng(0)
    parts = [build_segment([Document(rng.integers(0, 50, 150_000))], 100) for _ in range(2)]
    *pauses, merged = merge_in_slices(*parts, 100)
    assert len(pauses) >= 3
    assert all(pause is None for pause in pauses)
    np.testing.assert_array_equal(merged.suffixes, suffix_sort(merged.tokens, 100))


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_long_runs_and_many_equal_documents(vocab_size: int) -> None:
    """Radix and merge sort both at work, on the input where ties are worst."""
    documents = [[1] * 3000] + [[0, 1, 2, 1, 0, 2]] * 500
    segment = segment_of(documents, vocab_size)
    suffixes = segment.suffixes
    assert sorted(suffixes.tolist()) == np.flatnonzero(segment.tokens != vocab_size).tolist()
    padded = np.append(segment.tokens, np.full(SORT_DEPTH, vocab_size, segment.tokens.dtype))
    keys = []
    for position in suffixes.tolist():
        suffix = padded[position : position + SORT_DEPTH].tolist()
        end = suffix.index(vocab_size) if vocab_size in suffix else SORT_DEPTH
        keys.append((suffix[:end], position))
    assert keys == sorted(keys)


def test_token_dtype_leaves_room_for_the_separator() -> None:
    assert token_dtype(65_535) is np.uint16
    assert token_dtype(65_536) is np.uint32
