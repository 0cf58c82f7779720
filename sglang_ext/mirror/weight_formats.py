"""The draft model's weight matrices: as they are, or in 8 or 4 bits where there is no GPU.

A drafter need not be exact, and on a CPU a token costs what reading the weights costs. The packed
products are torch's, `_weight_int8pack_mm` and `_weight_int4pack_mm_for_cpu`, with bfloat16
activations: with float32 ones both take a slow path.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

FORMATS = ("fp32", "bf16", "int8", "int4")
_GROUP = 32  # weights that share a scale and a zero in 4 bits
_LEVELS_4, _MIDDLE_4 = 15, 8
_LEVELS_8 = 127
_OUT_MULTIPLE_4 = 32  # the packed product wants as many output features, or a multiple of them
# Rows that one call of a packed product may take: more rows at once can cost more than in turns.
_ROWS_AT_ONCE = (4, 8, 16, 64)
_MEASURED_ROWS = 16
_TIMED = 3

Product = Callable[[torch.Tensor], torch.Tensor]


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


class Int8Weight:
    """A matrix in 8 bits, a scale for each output feature."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.shape = _shape(weight)
        rows = weight.float()
        scales = rows.abs().amax(dim=1).clamp(min=1e-8) / _LEVELS_8
        self._packed = (rows / scales[:, None]).round().to(torch.int8).contiguous()
        self._scales = scales.to(torch.bfloat16)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        halves = x.to(torch.bfloat16)
        return in_parts(
            halves,
            lambda part: torch.ops.aten._weight_int8pack_mm(part, self._packed, self._scales),
            "int8",
        ).to(x.dtype)


class Int4Weight:
    """A matrix in 4 bits, a scale and a zero for each 32 weights of a row."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.shape = rows, columns = _shape(weight)
        groups = weight.float().view(rows, columns // _GROUP, _GROUP)
        low, high = groups.amin(dim=2), groups.amax(dim=2)
        # Rounded first, as the product reads them: the levels are then those that it restores.
        scales = ((high - low).clamp(min=1e-8) / _LEVELS_4).to(torch.bfloat16)
        zeros = (low + scales.float() * _MIDDLE_4).to(torch.bfloat16)
        offsets = (groups - zeros.float()[..., None]) / scales.float()[..., None]
        levels = (offsets.round() + _MIDDLE_4).clamp(0, _LEVELS_4).to(torch.int32)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            levels.view(rows, columns), 1
        )
        pairs = torch.stack([scales, zeros], dim=2)  # [rows, groups, 2]
        self._scales_and_zeros = pairs.transpose(0, 1).contiguous()

    def product(self, x: torch.Tensor) -> torch.Tensor:
        halves = x.to(torch.bfloat16)
        return in_parts(
            halves,
            lambda part: torch.ops.aten._weight_int4pack_mm_for_cpu(
                part, self._packed, _GROUP, self._scales_and_zeros
            ),
            "int4",
        ).to(x.dtype)


def _shape(weight: torch.Tensor) -> tuple[int, int]:
    rows, columns = weight.shape
    return rows, columns


# Rows at once, by format; measured when the first matrices are there.
_rows_at_once: dict[str, int] = {}


def in_parts(x: torch.Tensor, product: Product, kind: str) -> torch.Tensor:
    """A product of as many rows at a time as this CPU does best."""
    most = _rows_at_once.get(kind, _ROWS_AT_ONCE[-1])
    if len(x) <= most:
        return product(x)
    return torch.cat([product(part) for part in x.split(most)])


def measure_rows(weights: Sequence[Weight], columns: int) -> None:
    """Find out how many rows at a time the packed products of these matrices take best.

    Args:
        weights: matrices of one format, of `columns` input features; together larger than caches.
    """
    kind = {Int8Weight: "int8", Int4Weight: "int4"}.get(type(weights[0]))  # type: ignore[call-overload]
    if kind is None:
        return
    x = torch.randn(_MEASURED_ROWS, columns)
    seconds = {}
    for most in _ROWS_AT_ONCE:
        _rows_at_once[kind] = most
        seconds[most] = min(_seconds(weights, x) for _ in range(_TIMED))
    _rows_at_once[kind] = min(seconds, key=lambda most: seconds[most])


def _seconds(weights: Sequence[Weight], x: torch.Tensor) -> float:
    begun = time.perf_counter()
    for weight in weights:
        weight.product(x)
    return time.perf_counter() - begun


def made(weight: torch.Tensor, kind: str, device: str) -> Weight:
    """A matrix [N, K] in one of FORMATS; in 8 bits where it does not fit 4.

    Packed formats are the CPU's; on another device they are bfloat16.
    """
    if kind == "fp32":
        return PlainWeight(weight.to(device), torch.float32)
    if kind == "bf16" or not device.startswith("cpu"):
        return PlainWeight(weight.to(device), torch.bfloat16)
    rows, columns = weight.shape
    if kind == "int4" and columns % _GROUP == 0 and rows % _OUT_MULTIPLE_4 == 0:
        return Int4Weight(weight)
    return Int8Weight(weight)
