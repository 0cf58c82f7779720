"""The draft model's weight matrices: as they are, or on a CPU in 16, 8 or 4 bits.

A drafter need not be exact, and on a CPU a token costs what reading the weights costs. The products
are the CPU engine's own (`sglang_ext.cpu`); with 8 and 4 bits a dozen rows cost little more than
one, so that many likely outcomes can be followed in one pass.
"""

from typing import Protocol

import torch
import torch.nn.functional as F

from sglang_ext.cpu.float_weights import FloatWeight
from sglang_ext.cpu.group_weights import GROUP, GroupWeight

FORMATS = ("fp32", "bf16", "int8", "int4")
# Of these, those that the CPU engine has products for, and their bits.
PACKED = {"bf16": 16, "int8": 8, "int4": 4}


class Weight(Protocol):
    """A matrix [N, K] that multiplies rows from the right."""

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]."""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, K] -> [rows, N], of x's dtype."""


class PlainWeight:
    """A matrix in a floating-point type, on any device."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype) -> None:
        self._weight = weight.to(dtype)
        self.shape = _shape(weight)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self._weight.dtype), self._weight).to(x.dtype)


class PackedWeight:
    """A matrix in bfloat16, or in 8 or 4 bits, in groups of 32, on a CPU.

    Args:
        weight: K a multiple of 32 for 8 and 4 bits.

    Raises:
        ValueError: another shape, or weights that are no finite numbers, in 8 or 4 bits.
    """

    def __init__(self, weight: torch.Tensor, bits: int) -> None:
        self._weight = (
            FloatWeight(weight, 16) if bits == PACKED["bf16"] else GroupWeight(weight, bits)
        )
        self.bits = bits
        self.shape = _shape(weight)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return self._weight.linear(x)


def _shape(weight: torch.Tensor) -> tuple[int, int]:
    rows, columns = weight.shape
    return rows, columns


def made(weight: torch.Tensor, kind: str, device: str) -> Weight:
    """A matrix [N, K] in one of FORMATS; in bfloat16 where its rows are no whole groups.

    8 and 4 bits are the CPU's; on another device they are bfloat16.

    Raises:
        ValueError: weights that are no finite numbers, in 8 or 4 bits.
    """
    if kind == "fp32":
        return PlainWeight(weight.to(device), torch.float32)
    if not device.startswith("cpu"):
        return PlainWeight(weight.to(device), torch.bfloat16)
    return PackedWeight(weight, PACKED["bf16" if weight.shape[1] % GROUP else kind])
