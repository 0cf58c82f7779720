"""A verify step without padding equals the padded one: what nodes see, and what is accepted."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.cpu.attention import VisibleSlots, verify_slots
from sglang_ext.step.verify import accept_on_host
from sglang_ext.tree import TokenTree, pack

VOCAB = 6
GREEDY = SimpleNamespace(is_all_greedy=True)


@st.composite
def batches(draw) -> list[TokenTree]:
    trees = []
    for _ in range(draw(st.integers(1, 4))):
        n = draw(st.integers(0, 6))
        tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=n, max_size=n))
        parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
        trees.append(
            TokenTree(
                np.array(tokens, dtype=np.int64),
                np.array(parents, dtype=np.int32),
                np.full(n, 0.5, dtype=np.float32),
            )
        )
    return trees


def seen(slots: VisibleSlots, token: int) -> tuple:
    """All that decides a token's attention."""
    start = slots.extra_start[token]
    extra = slots.extra[start : start + slots.extra_count[token]]
    return (slots.row[token], slots.start[token], slots.count[token], *sorted(extra))


def forward_batch(packed, nodes):
    bs, width = packed.tokens.shape
    slots = torch.arange(100, 100 + bs * width)
    spec = SimpleNamespace(draft_token_num=width, custom_mask=torch.from_numpy(packed.mask))
    if nodes is not None:
        spec.nodes, slots = nodes, slots[torch.from_numpy(nodes)]
    return SimpleNamespace(
        batch_size=bs,
        spec_info=spec,
        out_cache_loc=slots,
        req_pool_indices=torch.arange(bs) + 7,
        seq_lens=torch.arange(bs) + 30,
        encoder_lens=None,
    )


@given(batches())
def test_nodes_see_the_same_slots(trees):
    packed = pack([0] * len(trees), trees, 7)
    nodes = packed.nodes()
    padded = verify_slots(forward_batch(packed, None))
    ragged = verify_slots(forward_batch(packed, nodes))
    assert len(ragged.row) == len(nodes) == sum(len(t) + 1 for t in trees)
    for i, node in enumerate(nodes):
        assert seen(ragged, i) == seen(padded, node)


@given(batches(), st.integers(0, 2**31))
def test_the_same_tokens_are_accepted(trees, seed):
    packed = pack([0] * len(trees), trees, 7)
    nodes = packed.nodes()
    logits = torch.rand(packed.tokens.size, VOCAB, generator=torch.Generator().manual_seed(seed))
    positions = torch.zeros(packed.tokens.size, dtype=torch.int64)
    padded = accept_on_host(logits, packed, GREEDY, positions, None)
    ragged = accept_on_host(logits[torch.from_numpy(nodes)], packed, GREEDY, positions, None, nodes)
    assert torch.equal(padded.accept_index, ragged.accept_index)
    assert torch.equal(padded.accept_lens, ragged.accept_lens)
    path = padded.accept_index[padded.accept_index >= 0].long()
    assert torch.equal(padded.predict[path], ragged.predict[path])
