"""Whisper's encoder on CPUs whose weights have fewer bits: request by request, in bfloat16.

SGLang 0.5.23 encodes all requests of a prefill in one batch, in float32 (models/whisper.py). One
window fills the cores, and alone its states are those of any batch, even of products whose bits
depend on how many rows there are. Where a CPU is not fast at bfloat16 products are those of 8 bits
by channels, and the rest is SGLang's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from sglang_ext import sglang_points
from sglang_ext.cpu.linear import PackedLinearMethod, weights_version
from sglang_ext.cpu.packed_weights import has_fast_encoder
from sglang_ext.cpu.rounded_weights import RoundedWeight
from sglang_ext.options import Options
from sglang_ext.sglang_points.hooking import hook
from speech.bf16_encoder import Bf16Layer, Bf16Stem, Product
from speech.bf16_products import has_fast_bf16


def register() -> None:
    """Have SGLang's Whisper encode so; once in every process, before models load."""
    if has_fast_encoder(Options.from_env().cpu_weights):
        hook(sglang_points.ENCODER, _one_by_one)
        hook(sglang_points.ENCODER_LAYER, _layer)


def _one_by_one(
    original: Callable[..., Any],
    encoder: Any,
    input_features: torch.Tensor,
    position_ids: torch.Tensor,
    forward_batch: Any,
) -> torch.Tensor:
    """Features [requests, mels, 2 * frames] -> states [requests, frames, size]."""
    encode = _encode if has_fast_bf16() else original
    states = [
        encode(encoder, features, position_ids, forward_batch)
        for features in input_features.split(1)
    ]
    return states[0] if len(states) == 1 else torch.cat(states)


def _encode(
    encoder: Any, features: torch.Tensor, position_ids: torch.Tensor, forward_batch: Any
) -> torch.Tensor:
    """WhisperEncoder.forward, its convolutions in bfloat16."""
    states = _stem_of(encoder)(features) + encoder.embed_positions(position_ids)
    for layer in encoder.layers:
        states = layer(states, forward_batch)
    return encoder.layer_norm(states)


_stems: "WeakKeyDictionary[Any, tuple[int, Bf16Stem]]" = WeakKeyDictionary()


def _stem_of(encoder: Any) -> Bf16Stem:
    """The encoder's convolutions with the weights that it has now."""
    version, stem = _stems.get(encoder, (-1, None))
    if stem is None or version != weights_version():
        stem = Bf16Stem([(conv.weight, conv.bias) for conv in (encoder.conv1, encoder.conv2)])
        _stems[encoder] = weights_version(), stem
    return stem


def _layer(
    original: Callable[..., Any], layer: Any, hidden_states: torch.Tensor, forward_batch: Any
) -> torch.Tensor:
    """States [requests, frames, size] -> the same, behind a layer of the encoder."""
    attention = layer.self_attn
    linear = (attention.qkv_proj, attention.out_proj, layer.fc1, layer.fc2)
    products = [found for each in linear if (found := _product(each)) is not None]
    if len(products) < len(linear) or not _is_exact_gelu(layer.activation_fn):
        return original(layer, hidden_states, forward_batch)
    qkv, out, fc1, fc2 = products
    return Bf16Layer(
        layer.self_attn_layer_norm, qkv, out, layer.final_layer_norm, fc1, fc2,
        attention.num_heads, attention.scaling,
    )(hidden_states)  # fmt: skip


def _product(linear: Any) -> Product | None:
    """A layer's product of bfloat16 rows; None: it is multiplied by otherwise."""
    method = getattr(linear, "quant_method", None)
    weight = method.product_of(linear) if isinstance(method, PackedLinearMethod) else None
    if not isinstance(weight, RoundedWeight) or getattr(linear, "tp_size", 1) > 1:
        return None
    return partial(weight.product, bias=linear.bias)


def _is_exact_gelu(activation: Any) -> bool:
    return isinstance(activation, torch.nn.GELU) and activation.approximate == "none"
