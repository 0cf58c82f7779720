"""Drafted paths as a token tree."""

import numpy as np
import pytest

from sglang_ext.block_drafter.block_paths import Paths
from sglang_ext.block_drafter.block_trees import block_tree
from sglang_ext.block_drafter.kept_tokens import FIRST, UNKNOWN, KeptTokens

KEPT = KeptTokens(np.arange(50), 50, 50)


def paths(*nodes: tuple[int, int, float]) -> Paths:
    """Of tokens, the nodes before them and probabilities behind these; -1 is the unknown token."""
    rows = np.array([FIRST + token if token >= 0 else UNKNOWN for token, _, _ in nodes])
    parents = np.array([parent for _, parent, _ in nodes])
    logprobs = np.log(np.array([p for _, _, p in nodes], np.float32))
    scores = logprobs.copy()
    for i, parent in enumerate(parents):
        scores[i] += scores[parent] if parent >= 0 else 0
    return Paths(rows, parents, logprobs, scores)


def test_one_choice_a_place_is_the_chain_as_published():
    tree = block_tree(paths((7, -1, 0.9), (8, 0, 0.5), (9, 1, 0.8)), KEPT, 8, ())
    assert tree.tokens.tolist() == [7, 8, 9]
    assert tree.parents.tolist() == [-1, 0, 1]
    assert tree.probs == pytest.approx([0.9, 0.45, 0.36])


def test_branches_stand_where_the_block_is_unsure():
    unsure = paths(
        (7, -1, 0.9), (3, -1, 0.05), (8, 0, 0.5), (4, 0, 0.4), (6, 1, 0.9),
        (9, 2, 0.9), (5, 2, 0.05), (9, 3, 0.8), (5, 3, 0.05),
    )  # fmt: skip
    tree = block_tree(unsure, KEPT, 5, ())
    tree.check(50)
    found = set(zip(tree.tokens.tolist(), tree.depths().tolist(), strict=True))
    assert found == {(7, 1), (8, 2), (9, 3), (4, 2)}  # 9 behind 8 and behind 4
    assert len(tree) == 5
    assert (np.diff(tree.probs) <= 0).all()


def test_what_stands_at_a_place_depends_on_the_path_to_it():
    tree = block_tree(paths((7, -1, 0.6), (8, -1, 0.4), (1, 0, 0.9), (2, 1, 0.9)), KEPT, 8, ())
    inner = np.flatnonzero(tree.parents >= 0)
    by_path = {int(tree.tokens[tree.parents[i]]): int(tree.tokens[i]) for i in inner}
    assert by_path == {7: 1, 8: 2}


def test_nodes_carry_the_drafters_own_log_probabilities():
    tree = block_tree(paths((7, -1, 0.9), (3, -1, 0.05), (8, 0, 0.5), (4, 0, 0.4)), KEPT, 3, ())
    assert tree.tokens.tolist() == [7, 8, 4]
    np.testing.assert_allclose(np.exp(tree.logprobs), [0.9, 0.5, 0.4], rtol=1e-5)
    np.testing.assert_allclose(tree.probs, [0.9, 0.45, 0.36], rtol=1e-5)


def test_equally_likely_nodes_stand_behind_their_parents():
    tree = block_tree(paths((7, -1, 1.0), (8, 0, 1.0), (9, 1, 1.0)), KEPT, 2, ())
    assert tree.tokens.tolist() == [7, 8] and tree.parents.tolist() == [-1, 0]


def test_nothing_is_drafted_behind_an_end_or_a_token_that_was_not_kept():
    behind_end = paths((7, -1, 0.9), (2, 0, 0.8), (9, 1, 0.7))
    assert block_tree(behind_end, KEPT, 8, {2}).tokens.tolist() == [7, 2]
    unnamed = paths((7, -1, 0.9), (3, -1, 0.1), (-1, 0, 0.6), (4, 0, 0.3), (9, 2, 0.9), (5, 2, 0.1))
    assert set(block_tree(unnamed, KEPT, 8, ()).tokens.tolist()) == {7, 3, 4}
    assert not len(block_tree(paths((-1, -1, 0.9)), KEPT, 8, ()))
