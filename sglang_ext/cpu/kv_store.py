"""Storing K and V in the KV pool on CPUs.

SGLang's path without AMX is `k_cache[indices] = k`, which torch hands to both of its threads from
32 tokens of a small model on, element by element: 300 us where `index_copy_` takes 20 us, twice in
every layer (SmolLM2-135M's rows, 2 cores).
"""

from collections.abc import Callable
from typing import Any

import torch

from sglang_ext import sglang_points
from sglang_ext.sglang_points.hooking import hook


def store_kv(
    original: Callable[..., None],
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> None:
    """`memory_pool._set_kv_buffer_impl`: rows k, v [T, H, D] to `indices` [T] of the caches."""
    if k_cache.device.type != "cpu" or k.dtype != k_cache.dtype or v.dtype != v_cache.dtype:
        return original(k, v, k_cache, v_cache, indices, *args, **kwargs)
    k_cache.index_copy_(0, indices, k.reshape(-1, *k_cache.shape[1:]))
    v_cache.index_copy_(0, indices, v.reshape(-1, *v_cache.shape[1:]))
    return None


def register() -> None:
    """Have SGLang store with `store_kv`; once in every process, before models load."""
    hook(sglang_points.STORE_KV, store_kv)
