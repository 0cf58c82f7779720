"""The input trie against naive counts over all positions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastores import DatastoreError, InputTrie, RetrievalConfig, extend_all
from datastores.input_trie import find_occurrences


def occurrences(trie: InputTrie, longest: int, limit: int = 1000, scan: int = 10**6) -> list:
    size = trie.tokens.size
    found, lengths = np.empty(limit, np.int32), np.empty(limit, np.int32)
    buckets = np.empty((longest + 1, limit + 1), np.int32)
    count = find_occurrences(
        trie._tokens[:size], trie._same_one[:size], trie._same_two[:size],
        longest, limit, scan, found, lengths, buckets,
    )  # fmt: skip
    return list(zip(lengths[:count].tolist(), found[:count].tolist(), strict=True))


def naive_occurrences(tokens: list[int], longest: int) -> list[tuple[int, int]]:
    result = []
    for end in range(1, len(tokens)):
        length = 0
        while length < min(longest, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length:
            result.append((length, end))
    return sorted(result, key=lambda pair: (-pair[0], -pair[1]))


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), max_size=60),
    pieces=st.lists(st.integers(0, 20), max_size=8),
    longest=st.integers(1, 6),
)
def test_finds_every_occurrence_longest_and_newest_first(
    tokens: list[int], pieces: list[int], longest: int
) -> None:
    trie = InputTrie()
    start = 0
    for piece in [*pieces, len(tokens)]:
        trie.extend(tokens[start : start + piece])
        start += piece
    assert len(trie) == len(tokens)
    assert trie.tokens.tolist() == tokens
    assert occurrences(trie, longest) == naive_occurrences(tokens, longest)


def test_growth_keeps_what_was_found() -> None:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 40, 5000)
    trie = InputTrie()
    for start in range(0, tokens.size, 7):
        trie.extend(tokens[start : start + 7])
    assert occurrences(trie, 4) == naive_occurrences(tokens.tolist(), 4)[:1000]


def test_limits_bound_the_work() -> None:
    trie = InputTrie()
    trie.extend([5] * 10_000)
    assert len(occurrences(trie, 4, limit=10)) == 10
    assert len(occurrences(trie, 4, limit=100, scan=30)) <= 30 + 100


def test_memory_is_bounded_and_the_newest_half_stays() -> None:
    trie = InputTrie(RetrievalConfig(max_input_tokens=1000))
    tokens = np.random.default_rng(2).integers(0, 5, 4321)
    for start in range(0, tokens.size, 100):
        trie.extend(tokens[start : start + 100])
    kept = trie.tokens
    assert len(trie) == tokens.size
    assert 500 <= kept.size <= 1000
    np.testing.assert_array_equal(kept, tokens[-kept.size :])
    assert trie.nbytes <= 28 * 1024
    assert occurrences(trie, 4) == naive_occurrences(kept.tolist(), 4)
    trie.extend(tokens)  # more at once than it keeps
    np.testing.assert_array_equal(trie.tokens, tokens[-500:])


def test_the_first_tokens_are_the_prompt_also_when_older_ones_are_forgotten() -> None:
    trie = InputTrie(RetrievalConfig(max_input_tokens=1000))
    assert trie.prompt_tokens == 0
    trie.extend(np.arange(900))
    assert trie.prompt_tokens == 900
    trie.extend(np.arange(100))
    assert trie.prompt_tokens == 900
    trie.extend(np.arange(1))  # 500 of the 1001 stay
    assert (trie.tokens.size, trie.prompt_tokens) == (500, 399)
    trie.extend(np.arange(600))
    assert (trie.tokens.size, trie.prompt_tokens) == (500, 0)


def test_a_prompt_may_be_empty_or_more_than_is_kept() -> None:
    trie = InputTrie(RetrievalConfig(max_input_tokens=1000))
    trie.extend([])
    trie.extend([1, 2, 3])
    assert trie.prompt_tokens == 0
    trie = InputTrie(RetrievalConfig(max_input_tokens=1000))
    trie.extend(np.arange(3000))
    assert trie.prompt_tokens == trie.tokens.size == 500


def test_memory_per_token() -> None:
    trie = InputTrie()
    trie.extend(np.arange(30_000))
    assert trie.nbytes <= 30_000 * 28 * 2


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([1, -2], "-2"), ([1.5], "whole numbers"), ([[1], [2]], "one-dimensional"),
     ([1 << 40], "outside")],
)  # fmt: skip
def test_bad_tokens_are_refused_and_change_nothing(tokens: list, message: str) -> None:
    trie = InputTrie()
    trie.extend([1, 2, 3])
    with pytest.raises(DatastoreError, match=message):
        trie.extend(tokens)
    assert trie.tokens.tolist() == [1, 2, 3]


def test_tokens_are_read_only() -> None:
    trie = InputTrie()
    trie.extend([1, 2])
    with pytest.raises(ValueError, match="read-only"):
        trie.tokens[0] = 9


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=4),
    steps=st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), max_size=6),
    limit=st.sampled_from([16, 300, 1 << 20]),
)
def test_tries_extended_together_are_those_extended_one_by_one(
    prompts: list[list[int]], steps: list[list[int]], limit: int
) -> None:
    config = RetrievalConfig(max_input_tokens=limit)
    together, alone = ([InputTrie(config) for _ in prompts] for _ in range(2))
    for trie, other, prompt in zip(together, alone, prompts, strict=True):
        trie.extend(prompt * 20)
        other.extend(prompt * 20)
    for counts in steps:
        new = [[n % 4] * n for n in counts[: len(prompts)]]
        extend_all(together, new)
        for other, tokens in zip(alone, new, strict=True):
            other.extend(tokens)
    for trie, other in zip(together, alone, strict=True):
        assert len(trie) == len(other) and trie.prompt_tokens == other.prompt_tokens
        assert trie.tokens.tolist() == other.tokens.tolist()
        assert (
            occurrences(trie, 4)
            == occurrences(other, 4)
            == naive_occurrences(trie.tokens.tolist(), 4)
        )


def test_a_wrong_token_reaches_none_of_the_tries() -> None:
    tries = [InputTrie(), InputTrie()]
    for trie in tries:
        trie.extend([1, 2])
    with pytest.raises(DatastoreError, match="token id -1"):
        extend_all(tries, [[3], [-1]])
    assert [trie.tokens.tolist() for trie in tries] == [[1, 2], [1, 2]]
