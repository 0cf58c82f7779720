"""Tree penalties equal the penalties that plain decoding would apply after the same tokens."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_ext import penalties
from sglang_ext.tree import TokenTree, pack

VOCAB = 12


def request(**params):
    defaults = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "stop_token_ids": {3},
    }
    return SimpleNamespace(
        sampling_params=SimpleNamespace(**defaults | params),
        eos_token_ids={2},
        tokenizer=SimpleNamespace(eos_token_id=2, additional_stop_token_ids=None),
    )


def plain(logits: torch.Tensor, req, output: list[int]) -> torch.Tensor:
    """One step of plain decoding, token by token as SGLang's penalizers count."""
    logits, p = logits.clone(), req.sampling_params
    for token in output:
        logits[token] -= p.frequency_penalty
    for token in set(output):
        logits[token] -= p.presence_penalty
    if len(output) < p.min_new_tokens:
        logits[[2, 3]] = float("-inf")
    for token in set(output):
        value = logits[token]
        scale = p.repetition_penalty
        logits[token] = value * scale if value < 0 else value / scale
    return logits


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 0.7},
        {"presence_penalty": 1.1},
        {"repetition_penalty": 1.3},
        {"frequency_penalty": -0.5, "presence_penalty": 0.4, "repetition_penalty": 0.8},
        {"min_new_tokens": 9, "frequency_penalty": 0.2},
        {},
    ],
)
def test_each_node_gets_its_own_paths_penalties(params):
    req, output = request(**params), [1, 4, 4]
    tree = TokenTree(
        np.array([5, 4, 5, 5, 6]), np.array([-1, 0, 1, -1, 2], dtype=np.int32), np.ones(5)
    )
    other = request(presence_penalty=0.3)
    packed = pack([4, 7], [tree, TokenTree.chain([8])], 7)
    logits = torch.randn(14, VOCAB)
    expected = logits.clone()
    for b, (r, out) in enumerate([(req, output), (other, [7])]):
        for node in range(int(packed.sizes[b])):
            path, at = [], node
            while at > 0:
                path.insert(0, int(packed.tokens[b, at]))
                at = int(packed.parents[b, at])
            expected[b * 7 + node] = plain(logits[b * 7 + node], r, out + path)
    penalties.apply_tree_penalties(logits, [req, other], [output, [7]], packed)
    for b in range(2):
        rows = slice(b * 7, b * 7 + int(packed.sizes[b]))
        torch.testing.assert_close(logits[rows], expected[rows])


def test_depth_stops_where_min_new_tokens_is_reached():
    assert penalties.max_depth(request(min_new_tokens=5), output_len=2) == 2
    assert penalties.max_depth(request(min_new_tokens=5), output_len=5) is None
    assert not penalties.is_penalized(request())
    assert penalties.is_penalized(request(min_new_tokens=1))
