"""The draft model's encoder: in bfloat16 where weights have 8 bits and the CPU is fast at it."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from speech.bf16_encoder import Bf16Layer, Bf16Stem
from speech.bf16_products import Bf16Product, has_fast_bf16
from speech.specasr.weights import Weights, WhisperShape

Layer = Callable[[torch.Tensor], torch.Tensor]


class DraftEncoder:
    """Features to the states that a Whisper's decoder attends to.

    Attributes:
        dtype: that it computes in, mostly.
    """

    def __init__(self, shape: WhisperShape, weights: Weights) -> None:
        # Rows of 8 bits would lose more than bfloat16 loses.
        rounds = weights.precision == "int8" and has_fast_bf16()
        self.dtype = torch.bfloat16 if rounds else weights.dtype
        convs = [
            (weights.take(f"encoder.conv{i}.weight"), weights.take(f"encoder.conv{i}.bias"))
            for i in (1, 2)
        ]
        self._embedded = Bf16Stem(convs) if rounds else _stem(convs)
        self._positions = weights.take("encoder.embed_positions.weight")
        layer = _bf16_layer if rounds else _layer
        self._layers = [
            layer(weights, f"encoder.layers.{index}", shape)
            for index in range(shape.encoder_layers)
        ]
        self._norm = _norm(weights, "encoder.layer_norm")

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """[1, mels, frames] on any device -> [frames / 2, d_model] on the weights'."""
        x = features.to(self._positions.device, self._positions.dtype, non_blocking=True)
        x = self._embedded(x)[0]
        x = x + self._positions[: len(x)]
        for layer in self._layers:
            x = layer(x)
        return self._norm(x)


def _stem(convolutions: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Layer:
    def stem(x: torch.Tensor) -> torch.Tensor:
        for stride, conv in enumerate(convolutions, 1):
            x = F.gelu(F.conv1d(x, *conv, stride=stride, padding=1))
        return x.mT

    return stem


def _norm(weights: Weights, name: str) -> Layer:
    """A LayerNorm of the last axis."""
    weight, bias = weights.norm(name)
    return lambda x: torch.layer_norm(x, x.shape[-1:], weight, bias)


def _layer(weights: Weights, name: str, shape: WhisperShape) -> Layer:
    heads, attention = shape.encoder_heads, f"{name}.self_attn"
    attention_norm = _norm(weights, f"{attention}_layer_norm")
    final_norm = _norm(weights, f"{name}.final_layer_norm")
    qkv = weights.linear(*(f"{attention}.{part}_proj" for part in "qkv"))
    out = weights.linear(f"{attention}.out_proj")
    fc1, fc2 = weights.linear(f"{name}.fc1"), weights.linear(f"{name}.fc2")

    def layer(x: torch.Tensor) -> torch.Tensor:
        parts = qkv(attention_norm(x)).unflatten(-1, (3, heads, -1)).permute(1, 2, 0, 3)
        seen = F.scaled_dot_product_attention(*parts[:, None])[0]
        x = x + out(seen.transpose(0, 1).flatten(1))
        return x + fc2(F.gelu(fc1(final_norm(x))))

    return layer


def _bf16_layer(weights: Weights, name: str, shape: WhisperShape) -> Layer:
    attention = f"{name}.self_attn"
    product = partial(_product, weights)
    return Bf16Layer(
        attention_norm=_norm(weights, f"{attention}_layer_norm"),
        qkv=product(*(f"{attention}.{part}_proj" for part in "qkv")),
        out=product(f"{attention}.out_proj"),
        final_norm=_norm(weights, f"{name}.final_layer_norm"),
        fc1=product(f"{name}.fc1"),
        fc2=product(f"{name}.fc2"),
        heads=shape.encoder_heads,
        scale=(shape.d_model // shape.encoder_heads) ** -0.5,
    )


def _product(weights: Weights, *names: str) -> Bf16Product:
    return Bf16Product(*weights.stacked(*names))
