"""Tokens that a prefill has shown: what of a draft is right, and what comes behind them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_ext.step.known_tokens import KnownHead, KnownTable, KnownTokens, right_tokens


def from_numpy(arrays):
    return [torch.from_numpy(array) for array in arrays]


@pytest.mark.parametrize(
    "draft, predicted, known",
    [
        ([6, 7, 9], [6, 7, 8, 4], KnownTokens(6, [7, 8])),
        ([6], [6, 7], KnownTokens(6, [7])),
        ([5, 7], [6, 7, 8], None),
        ([], [6], None),
    ],
)
def test_of_a_chain_counts_what_the_target_said_too(draft, predicted, known):
    assert right_tokens(draft, predicted) == known


def test_each_request_has_its_own_tokens_or_none():
    head = KnownHead.of([KnownTokens(6, [7, 8]), None, KnownTokens(1, [2])], from_numpy)
    assert head.tokens.tolist() == [[7, 8], [0, 0], [2, 0]]
    assert head.lens.tolist() == head.counts == [2, 0, 1]


@pytest.mark.parametrize("most, columns", [(9, 5), (4, 4)])
def test_a_steps_tokens_go_behind_the_known_ones(most, columns):
    head = KnownHead.of([KnownTokens(6, [7, 8]), None, KnownTokens(1, [2])], from_numpy)
    tokens, lens = head.joined(
        torch.tensor([[9, 10, 99], [3, 99, 99], [4, 5, 6]]),
        torch.tensor([2, 1, 3], dtype=torch.int32),
        most,
    )
    assert lens.tolist() == [4, 1, 4] and lens.dtype == torch.int32
    rows = [[7, 8, 9, 10, 0], [3, 0, 0, 0, 0], [2, 4, 5, 6, 0]]
    assert tokens.tolist() == [row[:columns] for row in rows]


def test_an_end_is_left_to_the_step_that_follows():
    kv = torch.arange(2.0)
    known = KnownTokens(6, [7, 2], [(kv, kv + 5)])
    assert known.before(np.array([3])) is known
    shorter = known.before(np.array([2, 3]))
    assert (shorter.first, shorter.tokens) == (6, [7])
    [(k, v)] = shorter.kv
    assert (k.tolist(), v.tolist()) == ([0], [5])
    assert KnownTokens(6, [2]).before(np.array([2])) is None


def test_what_is_known_is_of_one_request_and_not_of_its_namesake():
    table, req = KnownTable(), SimpleNamespace(rid="a")
    table.add(req, KnownTokens(6, [7]))
    assert table and table.has(req)
    assert not table.has(SimpleNamespace(rid="a")) and not table.has(SimpleNamespace(rid="b"))
