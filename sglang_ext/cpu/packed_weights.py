"""Weight matrices as CPUs multiply by them: packed with all of their bits or fewer, or as they are.

Plain torch hands fp32 products to MKL, which packs the weight matrix again at every call. Packed
once, a product of few rows takes as long as reading the weights from memory, and rows come out
bitwise the same whatever the number of rows beside them (see float_weights.py, group_weights.py,
channel_weights.py and, for oneDNN's, product_rows.py).
"""

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F

from sglang_ext.cpu.channel_weights import ChannelWeight, by_channels
from sglang_ext.cpu.float_weights import FloatWeight
from sglang_ext.cpu.group_weights import GroupWeight, grouped
from sglang_ext.cpu.lane_vectors import HAS_WIDE_REGISTERS
from sglang_ext.cpu.product_rows import pack, product, rounded_up, rows_to_run
from sglang_ext.cpu.rounded_weights import RoundedWeight
from speech.bf16_products import has_fast_bf16

BITS = {"bf16": 16, "int8": 8, "int4": 4}
"""Of a weight, by the formats of `--cpu-weights` that have fewer than float32."""

# The tokens that a head ranks lie close together.
_FEWEST_HEAD_BITS = 8

# `bf16` rounds no row.
_FAST_ENCODER_FORMS = ("int8", "int4")

ENCODER_VARIABLE = "SGLANG_EXT_CPU_FAST_ENCODER"
"""Set to 0, it keeps groups of 32 inputs in all layers."""


def has_fast_encoder(form: str) -> bool:
    """Whether layers that run at prefill only have products of many rows with `--cpu-weights`."""
    return form in _FAST_ENCODER_FORMS and os.environ.get(ENCODER_VARIABLE) != "0"


def bits_of(form: str, *, head: bool = False) -> int | None:
    """Of a weight with this format of `--cpu-weights`; None: as many as it has.

    Args:
        head: whether it is an LM head's, which has 8 at least.
    """
    bits = BITS.get(form)
    return max(bits, _FEWEST_HEAD_BITS) if bits is not None and head else bits


class PackedWeight:
    """A weight matrix [N, K] in oneDNN's layout, with the product x @ weight.T + bias.

    Attributes:
        nbytes: what a product reads of it.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.nbytes = weight.nbytes
        self._packed = pack(weight.detach())
        rows, columns = weight.shape
        self._rows_to_run = rows_to_run(rows, columns, weight.dtype, torch.get_num_threads())

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] -> [..., N], of the weight's dtype."""
        x2d = x.reshape(-1, x.shape[-1])
        rows = x2d.shape[0]
        listed = self._rows_to_run
        more = (listed[rows] if rows < len(listed) else rounded_up(rows)) - rows
        if more:
            out = product(F.pad(x2d, (0, 0, 0, more)), self._packed, bias)[:rows]
        else:
            out = product(x2d, self._packed, bias)
        return out.view(*x.shape[:-1], out.shape[-1])


class PlainWeight:
    """A weight matrix [N, K] that is multiplied by as it is.

    Attributes:
        nbytes: what a product reads of it.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.nbytes = weight.nbytes
        self._weight = weight

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] -> [..., N]."""
        return F.linear(x, self._weight, bias)


Product = PackedWeight | FloatWeight | GroupWeight | ChannelWeight | RoundedWeight | PlainWeight


def in_bits(weight: torch.Tensor, bits: int) -> Product:
    """The matrix in 16, 8 or 4 bits; as it is where 8 or 4 do not fit, which the log tells."""
    if bits == BITS["bf16"]:
        return FloatWeight(weight, 16)
    return grouped(weight, bits) or as_it_is(weight)


def for_prefill(weight: torch.Tensor, bits: int) -> Product:
    """`in_bits` for layers that have many rows whenever they run: 8 bits by channels for 8 or 4."""
    by_many = by_channels(weight) if bits != BITS["bf16"] else None
    return by_many or in_bits(weight, bits)


def for_encoder(weight: torch.Tensor, bits: int) -> Product:
    """`for_prefill` for layers that see one request's rows at a time: bfloat16 where it is fast."""
    if bits == BITS["bf16"] or not has_fast_bf16():
        return for_prefill(weight, bits)
    return RoundedWeight(weight)


def as_it_is(weight: torch.Tensor) -> FloatWeight | PackedWeight | PlainWeight:
    """The matrix with all of its bits, packed where this CPU has a packed product for it."""
    if not can_pack(weight):
        return PlainWeight(weight)
    # Of oneDNN eight rows take 1.4 times as long as one, of ours 1.1 times (docs/cpu.md).
    if HAS_WIDE_REGISTERS and weight.dtype == torch.float32:
        return FloatWeight(weight, 32)
    return PackedWeight(weight)


def packed_product(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """x [T, K] -> x @ weight.T + bias, [T, N], packed once where this CPU has that."""
    made = as_it_is(weight)
    return lambda x: made.linear(x, bias)


def can_pack(weight: torch.Tensor) -> bool:
    """Whether there is a packed product for this weight, with all of its bits, on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    if weight.device.type != "cpu" or weight.dim() != 2 or not weight.is_contiguous():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


def is_float_matrix(weight: torch.Tensor) -> bool:
    """Whether the weight can be brought to fewer bits, as far as its type says."""
    types = (torch.float32, torch.bfloat16, torch.float16)
    return weight.device.type == "cpu" and weight.dim() == 2 and weight.dtype in types
