"""Rotary embedding in one compiled pass.

SGLang's CPU path without AMX takes some 20 torch operators per layer for it: 45 us at batch 1,
against 12 us here. (RMSNorm and SiLU were tried the same way and gained nothing that shows.)
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numba
import torch

from sglang_ext import sglang_points
from sglang_ext.sglang_points.hooking import hook

if TYPE_CHECKING:
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding


@numba.njit(
    "void(float32[:, :], int64[::1], float32[:, ::1], float32[:, ::1], int64, boolean)",
    nogil=True,
    cache=True,
)
def rotate(x, positions, cos_sin, out, head_size, halves):
    """Rotate x [T, H * head_size] (may be strided) at positions [T]; all float32.

    cos_sin: [P, R], cosines first; the first R entries of a head are rotated. halves: pairs are
    (i, i + R / 2) as in GPT-NeoX, otherwise (2i, 2i + 1) as in GPT-J.
    """
    rotary = cos_sin.shape[1]
    half = rotary // 2
    for t in range(x.shape[0]):
        for base in range(0, x.shape[1], head_size):
            for i in range(half):
                a = base + i if halves else base + 2 * i
                b = base + half + i if halves else base + 2 * i + 1
                cos, sin = cos_sin[positions[t], i], cos_sin[positions[t], half + i]
                out[t, a] = x[t, a] * cos - x[t, b] * sin
                out[t, b] = x[t, b] * cos + x[t, a] * sin
            for i in range(base + rotary, base + head_size):
                out[t, i] = x[t, i]


def rotary_embedding(
    original: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    layer: "RotaryEmbedding",
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: object | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`RotaryEmbedding.forward_native`: query and key [T, H * D] at positions [T].

    What `rotate` does not cover (other dtypes, variants with their own code) goes to `original`.
    """
    covered = (
        covers(layer)
        and offsets is None
        and fused_set_kv_buffer_arg is None
        and positions.dim() == 1
        and positions.dtype == torch.int64
        and query.dim() == key.dim() == 2
        and query.dtype == key.dtype == torch.float32
    )
    if not covered:
        return original(layer, positions, query, key, offsets, fused_set_kv_buffer_arg)
    at, table = positions.numpy(), layer.cos_sin_cache.numpy()
    query_out, key_out = query.new_empty(query.shape), key.new_empty(key.shape)
    for x, out in ((query, query_out), (key, key_out)):
        rotate(x.numpy(), at, table, out.numpy(), layer.head_size, layer.is_neox_style)
    return query_out, key_out


def covers(layer: "RotaryEmbedding") -> bool:
    """Whether `rotate` is what this layer does to rows of float32."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    return (
        isinstance(layer, RotaryEmbedding)
        and type(layer).forward_native is RotaryEmbedding.forward_native
        and not hasattr(layer, "sin_cos_cache")
        and layer.cos_sin_cache.dtype == torch.float32
    )


def register() -> None:
    """Have SGLang rotate with `rotate` on the CPU; once in every process, before models load.

    Without AMX, SGLang dispatches to `forward_native` and never to `forward_cpu`.
    """
    hook(sglang_points.ROTARY, rotary_embedding)
