"""Whisper's encoder on CPUs whose weights have fewer bits: request by request, attention in bf16.

SGLang 0.5.23 encodes all requests of a prefill in one batch, with attention in float32
(models/whisper.py). One window fills the cores, and alone its states are those of any batch.
"""

from collections.abc import Callable
from typing import Any

import torch

from sglang_ext import sglang_points
from sglang_ext.cpu.packed_weights import prefills_by_channels
from sglang_ext.options import Options
from sglang_ext.sglang_points.hooking import hook
from speech.bf16_attention import attend


def register() -> None:
    """Have SGLang's Whisper encode so; once in every process, before models load."""
    if prefills_by_channels(Options.from_env().cpu_weights):
        hook(sglang_points.ENCODER, _one_by_one)
        hook(sglang_points.ENCODER_ATTENTION, _attend)


def _one_by_one(
    original: Callable[..., Any],
    encoder: Any,
    input_features: torch.Tensor,
    position_ids: torch.Tensor,
    forward_batch: Any,
) -> torch.Tensor:
    """Features [requests, mels, 2 * frames] -> states [requests, frames, size]."""
    states = [
        original(encoder, features, position_ids, forward_batch)
        for features in input_features.split(1)
    ]
    return states[0] if len(states) == 1 else torch.cat(states)


def _attend(
    original: Callable[..., Any],
    attention: Any,
    hidden_states: torch.Tensor,
    forward_batch: Any,
    *more: Any,
    **named: Any,
) -> torch.Tensor:
    """States [requests, frames, size] -> the same, of an encoder's layer."""
    if not attention.is_encoder:
        return original(attention, hidden_states, forward_batch, *more, **named)
    qkv, _ = attention.qkv_proj(hidden_states)
    parts = qkv.unflatten(-1, (3, attention.num_heads, attention.head_dim))
    q, k, v = parts.permute(2, 0, 3, 1, 4)
    seen = attend(q, k, v, scale=attention.scaling)
    out, _ = attention.out_proj(seen.transpose(1, 2).flatten(2))
    return out
