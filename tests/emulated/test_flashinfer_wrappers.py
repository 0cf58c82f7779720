"""The emulated FlashInfer wrappers keep FlashInfer's contract and compute attention."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from scripts.emulation import flashinfer_kernels as kernels
from scripts.emulation.flashinfer_base import Wrapper
from scripts.emulation.flashinfer_wrappers import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    fast_decode_plan,
)

HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 16, 64
WORKSPACE = torch.zeros(16, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def float32(monkeypatch):
    monkeypatch.setattr(Wrapper, "allow_float32", True)
    torch.manual_seed(0)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def cache(dtype=torch.float32):
    return torch.randn(SLOTS, KV_HEADS, DIM, dtype=dtype), torch.randn(
        SLOTS, KV_HEADS, DIM, dtype=dtype
    )


def dense(q, k, v, seen, scale=DIM**-0.5, cap=0.0):
    """Attention query by query and head by head, in float64."""
    out = torch.zeros(len(q), HEADS, DIM, dtype=torch.float64)
    for i in range(len(q)):
        for head in range(HEADS):
            keys = [j for j in range(len(k)) if seen[i, j]]
            shared = head // (HEADS // KV_HEADS)
            logits = k[keys, shared].double() @ q[i, head].double() * scale
            if cap:
                logits = cap * torch.tanh(logits / cap)
            out[i, head] = torch.softmax(logits, 0) @ v[keys, shared].double()
    return out.float()


class Layout:
    """Two requests: 3 queries over 11 keys, 2 over 5, in shuffled slots."""

    queries, keys = (3, 2), (11, 5)

    def __init__(self, dtype=torch.float32):
        slots = torch.randperm(SLOTS)[: sum(self.keys)].int()
        self.qo, self.kv, self.indices = int32(0, 3, 5), int32(0, 11, 16), slots
        self.last = int32(1, 1)
        self.q = torch.randn(5, HEADS, DIM, dtype=dtype)
        self.cache = cache(dtype)
        self.mask = torch.rand(3 * 11 + 2 * 5) < 0.6
        self.mask[[0, 11, 22, 33, 38]] = True

    def plan(self, wrapper, mask=None, **options):
        dtypes = {"q_data_type": self.q.dtype, "kv_data_type": self.q.dtype}
        wrapper.begin_forward(
            self.qo, self.kv, self.indices, self.last, HEADS, KV_HEADS, DIM, 1,
            custom_mask=mask, **dtypes, **options,
        )  # fmt: skip

    def masks(self):
        return self.mask[:33].view(3, 11), self.mask[33:].view(2, 5)

    def expected(self, seen, **options):
        parts = []
        for i, visible in enumerate(seen):
            slots = self.indices[self.kv[i] : self.kv[i + 1]].long()
            q = self.q[self.qo[i] : self.qo[i + 1]]
            parts.append(dense(q, self.cache[0][slots], self.cache[1][slots], visible, **options))
        return torch.cat(parts)


def paged(bs=0, masked=True):
    """A wrapper; with `bs`, one for graphs of that batch size, with a mask buffer or without."""
    if not bs:
        return BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    masks = {
        "custom_mask_buf": torch.zeros(100, dtype=torch.uint8),
        "mask_indptr_buf": torch.zeros(bs + 1, dtype=torch.int32),
    }
    return BatchPrefillWithPagedKVCacheWrapper(
        WORKSPACE,
        use_cuda_graph=True,
        qo_indptr_buf=torch.zeros(bs + 1, dtype=torch.int32),
        paged_kv_indptr_buf=torch.zeros(bs + 1, dtype=torch.int32),
        paged_kv_indices_buf=torch.zeros(40, dtype=torch.int32),
        paged_kv_last_page_len_buf=torch.ones(bs, dtype=torch.int32),
        **(masks if masked else {}),
    )


def causal_masks(layout):
    return [torch.ones(n, m).tril(m - n).bool() for n, m in zip(layout.queries, layout.keys)]  # noqa: B905


def test_every_segment_of_a_mask_is_packed_from_a_byte_of_its_own_lowest_bit_first():
    bits = torch.rand(29) < 0.5
    packed, indptr = kernels.segment_packbits(bits, int32(0, 3, 3, 20, 28))
    want = [
        np.packbits(bits[a:b].numpy(), bitorder="little")
        for a, b in ((0, 3), (3, 3), (3, 20), (20, 28))
    ]
    assert indptr.tolist() == [0, 1, 1, 4, 5]
    assert packed.tolist() == np.concatenate(want).tolist()


def test_a_mask_shorter_than_its_segments_is_refused():
    layout = Layout()
    with pytest.raises(ValueError, match="42 elements, its segments have 43"):
        layout.plan(paged(), layout.mask[:-1])


@pytest.mark.parametrize("graph", [0, 2])
def test_paged_attention_follows_the_custom_mask(graph):
    layout, wrapper = Layout(), paged(graph)
    layout.plan(wrapper, layout.mask)
    got = wrapper.forward(layout.q, layout.cache, causal=True, sm_scale=0.3)
    assert torch.allclose(got, layout.expected(layout.masks(), scale=0.3), atol=1e-5)


def test_causal_queries_are_the_last_keys():
    layout, wrapper = Layout(), paged()
    layout.plan(wrapper)
    got = wrapper.forward(layout.q, layout.cache, causal=True)
    assert torch.allclose(got, layout.expected(causal_masks(layout)), atol=1e-5)


def test_a_planned_window_bounds_every_query():
    layout, wrapper = Layout(), paged()
    layout.plan(wrapper, window_left=2)
    got = wrapper.forward(layout.q, layout.cache, causal=True, window_left=2)
    seen = [mask & ~mask.roll(-3, 1) for mask in causal_masks(layout)]
    for mask in seen:
        mask[:, -3:] = True
        mask &= causal_masks(layout)[0 if mask.shape[1] == 11 else 1]
    assert [mask.sum(1).tolist() for mask in seen] == [[3, 3, 3], [3, 3]]
    assert torch.allclose(got, layout.expected(seen), atol=1e-5)


def test_a_window_that_was_not_planned_only_skips_what_a_whole_tile_cannot_reach():
    layout, wrapper = Layout(), paged()
    layout.plan(wrapper)
    got = wrapper.forward(layout.q, layout.cache, causal=True, window_left=2)
    seen = causal_masks(layout)
    seen[0][:, :6] = False  # query 0 is key 8 and reaches back to key 6
    seen[1][:, :1] = False
    assert torch.allclose(got, layout.expected(seen), atol=1e-5)


@pytest.mark.parametrize("planned", [0.0, 5.0])
def test_a_soft_cap_acts_only_where_it_was_planned(planned):
    layout, wrapper = Layout(), paged()
    layout.q *= 20
    layout.plan(wrapper, logits_soft_cap=planned)
    got = wrapper.forward(layout.q, layout.cache, causal=True, logits_soft_cap=5.0)
    assert torch.allclose(got, layout.expected(causal_masks(layout), cap=planned), atol=1e-5)


def test_a_long_prefill_is_that_of_its_rows():
    q = torch.randn(600, HEADS, DIM)
    k, v = torch.randn(2, 600, KV_HEADS, DIM)
    got, _ = kernels.attend(q, k, v, kernels.causal(600, 600), DIM**-0.5)
    rows = [0, 255, 256, 599]
    want = dense(q[rows], k, v, torch.ones(600, 600).tril().bool()[rows])
    assert torch.allclose(got[rows], want, atol=1e-5)


def test_a_chunk_merged_with_its_prefix_is_attention_over_both():
    layout = Layout()
    q, (k, v) = layout.q, torch.randn(2, 5, KV_HEADS, DIM)
    prefix, chunk = paged(), BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    layout.plan(prefix)
    chunk.begin_forward(layout.qo, layout.qo, HEADS, KV_HEADS, DIM, q_data_type=q.dtype)
    merged, sums = kernels.merge_state(
        *chunk.forward_return_lse(q, k, v, causal=True),
        *prefix.forward_return_lse(q, layout.cache, causal=False),
    )
    for i, rows in enumerate((slice(0, 3), slice(3, 5))):
        slots = layout.indices[layout.kv[i] : layout.kv[i + 1]].long()
        keys = torch.cat([layout.cache[0][slots], k[rows]])
        values = torch.cat([layout.cache[1][slots], v[rows]])
        seen = torch.ones(len(q[rows]), len(keys)).tril(len(slots)).bool()
        assert torch.allclose(merged[rows], dense(q[rows], keys, values, seen), atol=1e-5)
    scores = torch.cat([layout.cache[0][slots], k[rows]])[:-1, 0] @ q[3, 0] / math.sqrt(DIM)
    assert sums[3, 0].item() == pytest.approx(torch.logsumexp(scores, 0).item() / math.log(2))


def test_a_prefix_of_nothing_leaves_the_chunk_as_it_is():
    v, s = torch.randn(3, HEADS, DIM), torch.randn(3, HEADS)
    nothing, minus = kernels.attend(v, v[:0, :2], v[:0, :2], None, 1.0)
    assert torch.equal(kernels.merge_state(v, s, nothing, minus)[0], v)
    both = kernels.merge_state(nothing, minus, nothing, minus)
    assert both[0].abs().max() == 0 and bool((both[1] == -math.inf).all())


def test_a_replay_reads_what_the_buffers_hold():
    layout, wrapper = Layout(), paged(2)
    layout.plan(wrapper, torch.ones_like(layout.mask))
    captured = wrapper.forward(layout.q, layout.cache)
    packed, _ = kernels.segment_packbits(layout.mask, int32(0, 33, 43))
    wrapper._custom_mask_buf[: len(packed)] = packed
    replayed = wrapper.forward(layout.q, layout.cache)
    assert torch.allclose(replayed, layout.expected(layout.masks()), atol=1e-5)
    assert not torch.allclose(replayed, captured, atol=1e-2)


def test_a_graph_with_a_mask_buffer_applies_what_an_earlier_plan_left_there():
    layout, wrapper = Layout(), paged(2)
    layout.plan(wrapper, layout.mask)
    layout.plan(wrapper)
    got = wrapper.forward(layout.q, layout.cache)
    assert torch.allclose(got, layout.expected(layout.masks()), atol=1e-5)


def test_a_graph_refuses_what_its_buffers_have_no_room_for():
    layout = Layout()
    with pytest.raises(ValueError, match="custom_mask_buf"):
        layout.plan(paged(2, masked=False), layout.mask)
    with pytest.raises(ValueError, match="batch size should be fixed"):
        layout.plan(paged(3), layout.mask)
    small = paged(2)
    small._paged_kv_indices_buf = small._paged_kv_indices_buf[:15]
    with pytest.raises(ValueError, match="exceeds the allocated buffer"):
        layout.plan(small, layout.mask)
    small = paged(2)
    small._custom_mask_buf = small._custom_mask_buf[:6]
    with pytest.raises(ValueError, match="7 mask bytes in a buffer of 6"):
        layout.plan(small, layout.mask)


def test_a_graph_refuses_more_rows_than_it_was_captured_with():
    layout, wrapper = Layout(), paged(2)
    layout.plan(wrapper, layout.mask)
    layout.qo = int32(0, 3, 6)
    with pytest.raises(ValueError, match="number of rows"):
        layout.plan(wrapper)


def test_data_types_are_those_of_the_plan_and_float32_has_no_kernel(monkeypatch):
    half = Layout(torch.bfloat16)
    wrapper = paged()
    half.plan(wrapper, half.mask)
    got = wrapper.forward(half.q, half.cache)
    assert got.dtype == torch.bfloat16
    assert torch.allclose(got.float(), half.expected(half.masks()), atol=2e-2)
    with pytest.raises(ValueError, match=r"float32 does not match .*bfloat16"):
        wrapper.forward(half.q.float(), half.cache)
    monkeypatch.setattr(Wrapper, "allow_float32", False)
    with pytest.raises(KeyError, match="float32"):
        Layout().plan(paged())


def test_indices_are_int32_and_as_many_as_their_indptr_says():
    layout = Layout()
    layout.indices = layout.indices[:-1]
    with pytest.raises(ValueError, match="15 page indices"):
        layout.plan(paged())
    layout.indices = layout.indices.long()
    with pytest.raises(ValueError, match="expected int32"):
        layout.plan(paged())


def test_a_wrapper_refuses_other_numbers_of_rows_or_heads_than_planned():
    layout, wrapper = Layout(), paged()
    layout.plan(wrapper)
    with pytest.raises(ValueError, match="does not match qo_indptr"):
        wrapper.forward(layout.q[:4], layout.cache)
    with pytest.raises(ValueError, match="planned were 4"):
        wrapper.forward(torch.randn(5, 8, DIM), layout.cache)


def decoder(graph=False):
    buffers = {
        "paged_kv_indptr_buffer": torch.zeros(3, dtype=torch.int32),
        "paged_kv_indices_buffer": torch.zeros(40, dtype=torch.int32),
        "paged_kv_last_page_len_buffer": torch.ones(2, dtype=torch.int32),
    }
    return BatchDecodeWithPagedKVCacheWrapper(
        WORKSPACE, use_cuda_graph=graph, **(buffers if graph else {})
    )


@pytest.mark.parametrize("graph", [False, True])
def test_a_decode_step_sees_every_key(graph):
    layout, wrapper = Layout(), decoder(graph)
    layout.qo, layout.q = int32(0, 1, 2), layout.q[:2]
    kind = {"q_data_type": torch.float32, "data_type": torch.float32}
    wrapper.begin_forward(layout.kv, layout.indices, layout.last, HEADS, KV_HEADS, DIM, 1, **kind)
    want = layout.expected([torch.ones(1, m).bool() for m in layout.keys])
    assert torch.allclose(wrapper.forward(layout.q, layout.cache), want, atol=1e-5)


def test_a_fast_decode_plan_takes_the_buffers_as_they_are_and_checks_the_lengths_on_the_host():
    layout, wrapper = Layout(), decoder(graph=True)
    args = (HEADS, KV_HEADS, DIM, 1)
    kind = {"q_data_type": torch.float32, "data_type": torch.float32}
    wrapper.begin_forward(layout.kv, layout.indices, layout.last, *args, **kind)
    wrapper.begin_forward = partial(fast_decode_plan, wrapper)
    layout.kv = int32(0, 4, 9)
    wrapper._paged_kv_indptr_buf.copy_(layout.kv)
    replan = partial(wrapper.begin_forward, layout.kv, layout.indices, layout.last, *args, **kind)
    replan(global_override_indptr_cpu=int32(0, 4, 9))
    layout.qo, layout.q = int32(0, 1, 2), layout.q[:2]
    want = layout.expected([torch.ones(1, m).bool() for m in (4, 5)])
    assert torch.allclose(wrapper.forward(layout.q, layout.cache), want, atol=1e-5)
    with pytest.raises(ValueError, match="other lengths"):
        replan(global_override_indptr_cpu=int32(0, 4, 10))
