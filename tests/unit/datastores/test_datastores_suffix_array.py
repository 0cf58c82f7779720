"""Suffix arrays against naive substring counts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastores.config import SORT_DEPTH
from datastores.segment import Segment, build_segment, merge_in_slices
from datastores.suffix_array import find_interval, suffix_sort, token_dtype

# One vocabulary per packing: tiny ids, uint16, uint32 with 3 and with 2 tokens per sort key.
VOCAB_SIZES = (3, 49_152, 200_000, 1 << 30)
documents_of_two_ids = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=40), min_size=1, max_size=6
)


def segment_of(documents: list[list[int]], vocab_size: int) -> Segment:
    return build_segment([np.array(d, np.int32) for d in documents], vocab_size)


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


@settings(max_examples=80, deadline=None)
@given(
    documents=documents_of_two_ids,
    query=st.lists(st.integers(0, 2), min_size=1, max_size=SORT_DEPTH),
)
def test_interval_holds_every_occurrence_and_no_other(
    documents: list[list[int]], query: list[int]
) -> None:
    segment = segment_of(documents, 3)
    low, high = find_interval(segment.tokens, segment.suffixes, np.array(query, np.int32), 0, 3)
    assert high - low == naive_count(documents, query)
    for position in segment.suffixes[low:high]:
        assert segment.tokens[position : position + len(query)].tolist() == query


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
    assert merged.documents == len(older) + len(newer)


def test_merge_yields_between_slices() -> None:
    rng = np.random.default_rng(0)
    parts = [build_segment([rng.integers(0, 50, 150_000)], 100) for _ in range(2)]
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
