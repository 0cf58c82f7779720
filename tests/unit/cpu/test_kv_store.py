"""Storing K and V in the pool, against SGLang's own."""

import pytest
import torch
from sglang.srt.mem_cache import memory_pool

from sglang_ext.cpu.kv_store import store_kv


def unexpected(*args, **kwargs):
    raise AssertionError("handed over to SGLang")


def pools(dtype=torch.float32):
    return [torch.zeros(50, 3, 8, dtype=dtype) for _ in range(2)]


@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_stores_what_sglang_stores(generator, tokens):
    # As they come out of a fused projection: rows with a stride of their own.
    fused = torch.randn(tokens, 72, generator=generator)
    k, v = (part.view(-1, 3, 8) for part in fused.split(24, -1)[1:])
    slots = torch.randperm(50, generator=generator)[:tokens]
    ours, theirs = pools(), pools()
    store_kv(unexpected, k, v, *ours, slots, row_dim=24)
    original = getattr(memory_pool._set_kv_buffer_impl, "__wrapped__", None)
    (original or memory_pool._set_kv_buffer_impl)(
        k, v, *theirs, slots, row_dim=24, store_dtype=torch.float32, device_module=None,
        size_limit=50,
    )  # fmt: skip
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def test_other_dtypes_are_left_to_sglang():
    k = torch.ones(2, 3, 8)
    seen = []
    store_kv(lambda *args, **more: seen.append(more), k, k, *pools(torch.bfloat16), None, row_dim=1)
    assert seen == [{"row_dim": 1}]
