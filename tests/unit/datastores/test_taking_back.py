"""Tokens that a request only might have written: taken back, they were never there."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastores import DatastoreError, InputTrie
from tests.unit.datastores.test_datastores_input_trie import naive_occurrences, occurrences


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), max_size=60),
    tried=st.lists(st.lists(st.integers(0, 5), max_size=12), max_size=4),
    more=st.lists(st.integers(0, 3), max_size=10),
)
def test_what_is_taken_back_was_never_there(
    tokens: list[int], tried: list[list[int]], more: list[int]
) -> None:
    trie = InputTrie()
    trie.extend(tokens)
    for attempt in tried:
        trie.extend(attempt)
        trie.take_back(len(attempt))
    trie.extend(more)
    assert len(trie) == len(tokens) + len(more)
    assert trie.tokens.tolist() == tokens + more
    assert occurrences(trie, 4) == naive_occurrences(tokens + more, 4)


def test_taking_back_works_where_the_arrays_grew_in_between() -> None:
    rng = np.random.default_rng(2)
    tokens, attempt = rng.integers(0, 40, 250).tolist(), rng.integers(0, 40, 600).tolist()
    trie = InputTrie()
    trie.extend(tokens)
    trie.extend(attempt)
    trie.take_back(len(attempt))
    trie.extend(tokens)
    assert occurrences(trie, 4) == naive_occurrences(tokens * 2, 4)
    with pytest.raises(DatastoreError, match="501 tokens cannot be taken back"):
        trie.take_back(501)
