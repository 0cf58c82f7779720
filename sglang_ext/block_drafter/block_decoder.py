"""The block drafter's decoder as it is served: a compiled loop in 8 bits on CPUs, else torch."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from sglang_ext.block_drafter import decoder_kernel
from sglang_ext.block_drafter.nat_model import BlockModel
from sglang_ext.block_drafter.packed_linear import PackedLinear, packed, threads_for
from sglang_ext.block_drafter.request_memory import RequestMemory
from sglang_ext.block_drafter.served_layers import DecoderLayer, normed


class BlockDecoder:
    """Runs decoder passes of one model.

    Args:
        int8: in 8 bits, on CPUs alone.
    """

    def __init__(self, model: BlockModel, int8: bool) -> None:
        self._heads, self._norm = model.shape.heads, model.decoder.norm
        self._layers = [DecoderLayer(layer, int8) for layer in model.decoder.layers]
        made = [_packed_layer(layer) for layer in model.decoder.layers] if int8 else []
        self._packed = [layer for layer in made if layer is not None]
        self._compiled = len(self._packed) == len(self._layers)

    def keys_values(self, memory: torch.Tensor) -> torch.Tensor:
        """float[n, decoder layers, 2, s, heads, width / heads] of entries float[n, s, width]."""
        return torch.stack([layer.keys_values(memory, self._heads) for layer in self._layers], 1)

    def run(self, slots: torch.Tensor, memories: Sequence[RequestMemory]) -> torch.Tensor:
        """float[n, block, width], what is known of the places behind the first slot.

        Args:
            slots: float[n, 1 + block, width], of BlockModel.slots_of; may be written to.
            memories: of each request.
        """
        run = self._run_compiled if self._compiled else self._run_in_torch
        hidden = run(slots, memories)
        return normed(hidden[:, 1:], self._norm)

    def _run_in_torch(self, slots: torch.Tensor, memories: Sequence[RequestMemory]) -> torch.Tensor:
        kept, read = _together([memory.entries for memory in memories])
        for number, layer in enumerate(self._layers):
            slots = layer.run(slots, kept[:, number], read, self._heads)
        return slots

    def _run_compiled(self, slots: torch.Tensor, memories: Sequence[RequestMemory]) -> torch.Tensor:
        hidden = slots.contiguous()
        threads = threads_for(hidden.shape[0] * hidden.shape[1])
        counts = np.array([memory.count for memory in memories])
        for number, layer in enumerate(self._packed):
            addresses = np.array([memory.addresses(number) for memory in memories], np.uintp)
            keys, values = np.ascontiguousarray(addresses.T)
            decoder_kernel.run_layer(
                hidden.numpy(), layer.norms, layer.epsilon, layer.qkv, layer.out, layer.query,
                layer.cross_out, layer.first, layer.second, keys, values, counts, self._heads,
                threads,
            )  # fmt: skip
        return hidden


class _PackedLayer(NamedTuple):
    """As decoder_kernel.run_layer takes it."""

    norms: np.ndarray
    epsilon: np.float32
    qkv: PackedLinear
    out: PackedLinear
    query: PackedLinear
    cross_out: PackedLinear
    first: PackedLinear
    second: PackedLinear


def _packed_layer(layer: nn.TransformerDecoderLayer) -> _PackedLayer | None:
    """None where 8 bits do not fit, as `packed` has it."""
    own, cross, width = layer.self_attn, layer.multihead_attn, layer.self_attn.embed_dim
    made = [
        packed(weight, bias)
        for weight, bias in (
            (own.in_proj_weight, own.in_proj_bias),
            (own.out_proj.weight, own.out_proj.bias),
            (cross.in_proj_weight[:width], cross.in_proj_bias[:width]),
            (cross.out_proj.weight, cross.out_proj.bias),
            (layer.linear1.weight, layer.linear1.bias),
            (layer.linear2.weight, layer.linear2.bias),
        )
    ]
    weights = [weight for weight in made if weight is not None]
    if len(weights) < len(made):
        return None
    norms = [
        torch.stack([norm.weight, norm.bias]) for norm in (layer.norm1, layer.norm2, layer.norm3)
    ]
    return _PackedLayer(
        torch.stack(norms).detach().float().numpy(), np.float32(layer.norm1.eps), *weights
    )


def _together(entries: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Memories of different lengths as one tensor, and where each has entries (None: all)."""
    lengths = [each.shape[2] for each in entries]
    longest = max(lengths)
    if min(lengths) == longest:
        return torch.stack(list(entries)), None
    first = entries[0]
    joined = first.new_zeros((len(entries), *first.shape[:2], longest, *first.shape[3:]))
    for row, each in zip(joined, entries, strict=True):
        row[:, :, : each.shape[2]] = each
    ends = torch.tensor(lengths, device=joined.device)
    present = torch.arange(longest, device=joined.device) < ends[:, None]
    return joined, present[:, None, None]
