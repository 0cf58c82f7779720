"""The block drafter's layers as they are served: without dropout, int8 on CPUs."""

import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import layer_norm, linear, scaled_dot_product_attention

Apply = Callable[[torch.Tensor], torch.Tensor]


class EncoderLayer:
    """An nn.TransformerEncoderLayer with its norms first."""

    def __init__(self, layer: nn.TransformerEncoderLayer, int8: bool) -> None:
        self._norms = layer.norm1, layer.norm2
        attention = layer.self_attn
        self._qkv = linear_of(attention.in_proj_weight, attention.in_proj_bias, int8)
        self._out = linear_of(attention.out_proj.weight, attention.out_proj.bias, int8)
        self._forward = _feedforward(layer, int8)

    def run(self, hidden: torch.Tensor, seen: torch.Tensor, heads: int) -> torch.Tensor:
        """float[n, m, width] of the same; seen: bool[n, 1, 1, m]."""
        parts = self._norms[0], self._qkv, self._out
        hidden = hidden + _attended(hidden, *parts, seen, heads)
        return hidden + self._forward(normed(hidden, self._norms[1]))


class DecoderLayer:
    """An nn.TransformerDecoderLayer with its norms first; the source's keys and values given."""

    def __init__(self, layer: nn.TransformerDecoderLayer, int8: bool) -> None:
        self._norms = layer.norm1, layer.norm2, layer.norm3
        own, cross = layer.self_attn, layer.multihead_attn
        width = own.embed_dim
        self._qkv = linear_of(own.in_proj_weight, own.in_proj_bias, int8)
        self._out = linear_of(own.out_proj.weight, own.out_proj.bias, int8)
        self._query = linear_of(cross.in_proj_weight[:width], cross.in_proj_bias[:width], int8)
        self._source = linear_of(cross.in_proj_weight[width:], cross.in_proj_bias[width:], int8)
        self._cross_out = linear_of(cross.out_proj.weight, cross.out_proj.bias, int8)
        self._forward = _feedforward(layer, int8)

    def keys_values(self, memory: torch.Tensor, heads: int) -> torch.Tensor:
        """float[n, 2, m, heads, width / heads] of float[n, m, width]."""
        n, m, width = memory.shape
        return self._source(memory).view(n, m, 2, heads, width // heads).transpose(1, 2)

    def run(
        self,
        hidden: torch.Tensor,
        memory: torch.Tensor,
        read: torch.Tensor | None,
        heads: int,
    ) -> torch.Tensor:
        """float[n, k, width] of the same.

        Args:
            memory: of `keys_values`.
            read: bool[n, 1, 1, m], which entries of it are; None: all.
        """
        hidden = hidden + _attended(hidden, self._norms[0], self._qkv, self._out, None, heads)
        query = _by_head(self._query(normed(hidden, self._norms[1])), 1, heads)[:, 0]
        keys, values = memory.transpose(2, 3).unbind(1)
        found = scaled_dot_product_attention(query, keys, values, read)
        hidden = hidden + self._cross_out(_joined(found))
        return hidden + self._forward(normed(hidden, self._norms[2]))


def _attended(
    hidden: torch.Tensor,
    norm: nn.LayerNorm,
    qkv: Apply,
    out: Apply,
    seen: torch.Tensor | None,
    heads: int,
) -> torch.Tensor:
    """float[n, m, width], what each place finds in all; seen: bool[n, 1, 1, m], None: all."""
    query, key, value = _by_head(qkv(normed(hidden, norm)), 3, heads).unbind(1)
    found = scaled_dot_product_attention(query, key, value, seen)
    return out(_joined(found))


def _by_head(projected: torch.Tensor, parts: int, heads: int) -> torch.Tensor:
    """float[n, parts, heads, m, width / heads] of float[n, m, parts * width]."""
    n, m, wide = projected.shape
    return projected.view(n, m, parts, heads, wide // parts // heads).permute(0, 2, 3, 1, 4)


def _joined(by_head: torch.Tensor) -> torch.Tensor:
    """float[n, m, width] of float[n, heads, m, width / heads]."""
    return by_head.transpose(1, 2).flatten(2)


def normed(hidden: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
    """float[..., width], what a norm makes of the same."""
    return layer_norm(hidden, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def _feedforward(layer: nn.Module, int8: bool) -> Apply:
    first = linear_of(layer.linear1.weight, layer.linear1.bias, int8)
    second = linear_of(layer.linear2.weight, layer.linear2.bias, int8)
    return lambda hidden: second(first(hidden).relu_())


def linear_of(weight: torch.Tensor, bias: torch.Tensor, int8: bool) -> Apply:
    """x -> x W^T + b; in int8 weights have a scale a row, inputs one a call (torch's dynamic)."""
    if not int8:
        kept, added = weight.detach(), bias.detach()
        return lambda x: linear(x, kept, added)
    weight = weight.detach().float()
    scales = weight.abs().amax(1).clamp(min=1e-8) / 127
    with warnings.catch_warnings():  # it is to move to another package; SGLang pins this torch
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_channel(
            weight, scales.double(), torch.zeros(len(weight), dtype=torch.long), 0, torch.qint8
        )
        packed = torch.ops.quantized.linear_prepack(quantized, bias.detach().float())
    run = torch.ops.quantized.linear_dynamic
    return lambda x: run(x, packed, True)
