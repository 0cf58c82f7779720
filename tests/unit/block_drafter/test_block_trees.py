"""A drafted block as a token tree."""

import numpy as np
import pytest

from sglang_ext.block_drafter.block_predictor import Block
from sglang_ext.block_drafter.block_trees import block_tree
from sglang_ext.block_drafter.kept_tokens import FIRST, UNKNOWN, KeptTokens

KEPT = KeptTokens(np.arange(50), 50, 50)


def block(*places: dict[int, float]) -> Block:
    """Of probabilities by token at each place, the likeliest first; -1 is the unknown one."""
    rows = [[FIRST + t if t >= 0 else UNKNOWN for t in place] for place in places]
    return Block(np.array(rows), np.log(np.array([list(p.values()) for p in places], np.float32)))


def test_one_choice_a_place_is_the_chain_as_published():
    tree = block_tree(block({7: 0.9}, {8: 0.5}, {9: 0.8}), KEPT, 8, ())
    assert tree.tokens.tolist() == [7, 8, 9]
    assert tree.parents.tolist() == [-1, 0, 1]
    assert tree.probs == pytest.approx([0.9, 0.45, 0.36])


def test_branches_stand_where_the_block_is_unsure():
    unsure = block({7: 0.9, 3: 0.05}, {8: 0.5, 4: 0.4}, {9: 0.9, 5: 0.05})
    tree = block_tree(unsure, KEPT, 5, ())
    tree.check(50)
    paths = set(zip(tree.tokens.tolist(), tree.depths().tolist(), strict=True))
    assert paths == {(7, 1), (8, 2), (9, 3), (4, 2)}  # 9 behind 8 and behind 4
    assert len(tree) == 5
    assert (np.diff(tree.probs) <= 0).all()


def test_nodes_carry_the_drafters_own_log_probabilities():
    tree = block_tree(block({7: 0.9, 3: 0.05}, {8: 0.5, 4: 0.4}), KEPT, 3, ())
    assert tree.tokens.tolist() == [7, 8, 4]
    np.testing.assert_allclose(np.exp(tree.logprobs), [0.9, 0.5, 0.4], rtol=1e-5)
    np.testing.assert_allclose(tree.probs, [0.9, 0.45, 0.36], rtol=1e-5)


def test_a_sure_place_has_no_branch():
    tree = block_tree(block({7: 0.95, 3: 0.04}, {8: 0.5, 4: 0.4}), KEPT, 9, (), sure=0.9)
    assert 3 not in tree.tokens


def test_nothing_is_drafted_behind_an_end_or_a_token_that_was_not_kept():
    assert block_tree(block({7: 0.9}, {2: 0.8}, {9: 0.7}), KEPT, 8, {2}).tokens.tolist() == [7, 2]
    cut = block_tree(block({7: 0.9, 3: 0.1}, {-1: 0.6, 4: 0.3}, {9: 0.9, 5: 0.1}), KEPT, 8, ())
    assert set(cut.tokens.tolist()) == {7, 3, 4}
    assert not len(block_tree(block({-1: 0.9}), KEPT, 8, ()))
