"""Weight matrices in 8 or 4 bits, in groups of 32, and their products with float32 rows.

Rows are brought to 8 bits too, group by group, so that a group's sum is one of integers
(group_dots.py). One arithmetic serves one row and many: a row's result has the same bits whatever
is computed beside it, which is what makes speculative output plain output in these formats.
(torch's own packed products take bfloat16 rows, and are slower from four rows on.)
"""

import logging

import numba
import numpy as np
import torch
import torch.nn.functional as F

from sglang_ext.cpu.group_dots import GROUP
from sglang_ext.cpu.group_kernel import product
from sglang_ext.cpu.huge_pages import on_huge_pages
from sglang_ext.cpu.lane_vectors import LANES

logger = logging.getLogger(__name__)

_LEVELS_8, _LEVELS_4 = 127, 15
# The largest scale of a matrix, as a float16: small enough for least values beside it (up to 15
# times as large), large enough that scales a million times smaller keep ten bits.
_LARGEST_SCALE = 2048.0
# Packed by so many outputs at a time: what lies beside the packed weights meanwhile is bounded.
_PACKED_AT_ONCE = 4096
_GROUPS_LOOKED_AT = 256


class GroupWeight:
    """A float matrix [N, K] in 8 or 4 bits, with the product x @ weight.T + bias.

    An 8-bit weight is its level, -127 to 127, by its group's scale; a 4-bit one its level, 0 to 15,
    by the scale, plus the least of its group. Scales and least values are float16 beside one power
    of two for the matrix, so that no finite weight is too large or too small for them.

    Attributes:
        bits: 8 or 4.
        levels, scales: uint8[N / 16, K / 32, bytes of a group] and uint16[N / 16, K / 32, ...],
            bits of float16, N rounded up; factor: of both (group_kernel.py).

    Args:
        weight: K a multiple of 32, any N.

    Raises:
        ValueError: another shape, or a weight that is infinite or NaN.
    """

    def __init__(self, weight: torch.Tensor, bits: int) -> None:
        rows, columns = weight.shape
        if columns % GROUP or not columns:
            raise ValueError(f"{columns} inputs: expected a multiple of {GROUP}")
        largest = float(weight.detach().abs().max()) if rows else 0.0
        if not largest < float("inf"):
            raise ValueError("expected finite weights; some are infinite or NaN")
        self._rows, self._columns, self.bits = rows, columns, bits
        self.factor = _power_of_two(largest / _LARGEST_SCALE)
        parts = [_pack(part, bits, self.factor) for part in weight.detach().split(_PACKED_AT_ONCE)]
        self.levels = on_huge_pages([levels.numpy() for levels, _ in parts])
        self.scales = on_huge_pages([scales.view(torch.uint16).numpy() for _, scales in parts])
        self._threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)

    @property
    def nbytes(self) -> int:
        """What the packed weights take."""
        return self.levels.nbytes + self.scales.nbytes

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] -> [..., N], of x's dtype."""
        rows = x.reshape(-1, self._columns).to(torch.float32).contiguous().numpy()
        padded = self.levels.shape[0] * LANES
        out = torch.empty(len(rows), padded)
        product(
            self.bits, rows, self.levels, self.scales, out.numpy(), np.float32(self.factor),
            self._threads,
        )  # fmt: skip
        if padded != self._rows:
            out = out[:, : self._rows].contiguous()
        if bias is not None:
            out += bias
        return out.to(x.dtype).view(*x.shape[:-1], self._rows)


def grouped(weight: torch.Tensor, bits: int) -> GroupWeight | None:
    """The matrix in groups; None, with a warning, where its shape or values do not fit."""
    try:
        return GroupWeight(weight, bits)
    except ValueError as error:
        logger.warning(
            "a %d x %d weight stays as it is instead of %d bits: %s", *weight.shape, bits, error
        )
        return None


def _power_of_two(value: float) -> float:
    """The least power of two that is not below `value`, kept where float32 is exact."""
    exponent = torch.frexp(torch.tensor(max(value, 1e-30), dtype=torch.float64))[1]
    return float(2.0 ** int(exponent))


def _pack(weight: torch.Tensor, bits: int, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels uint8[N / 16, K / 32, bytes of a group], scales float16[N / 16, K / 32, ...]."""
    rows, columns = weight.shape
    padded = F.pad(weight.to(torch.float32) / factor, (0, 0, 0, -rows % LANES))
    groups = padded.view(-1, columns // GROUP, GROUP)
    return (_pack_8 if bits == 8 else _pack_4)(groups)


def _pack_8(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of groups [N, K / 32, 32] of weights; N a multiple of 16."""
    scales = (groups.abs().amax(dim=2) / _LEVELS_8).to(torch.float16)
    levels = _nearest(groups, scales).clamp(-_LEVELS_8, _LEVELS_8).to(torch.int8)
    lanes = _by_lanes(levels.view(*levels.shape[:2], GROUP // 4, 4))
    return lanes.view(torch.uint8), _by_lanes(scales[..., None, None])


def _pack_4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Rounded first, as the product reads them: the levels are then nearest to what it restores.
    least = groups.amin(dim=2).to(torch.float16)
    offsets = groups - least.float()[..., None]
    span = offsets.amax(dim=2).clamp(min=0)
    if _has_sixteen_levels(groups):
        scales = _scales_of_levels(offsets, span)
    else:
        scales = (span / _LEVELS_4).to(torch.float16)
    levels = _nearest(offsets, scales).clamp(0, _LEVELS_4)
    fours = levels.to(torch.uint8).view(*levels.shape[:2], GROUP // 8, 2, 4)
    lanes = _by_lanes(fours[..., 0, :] | (fours[..., 1, :] << 4))
    both = torch.stack([scales, least], dim=2)
    return lanes, _by_lanes(both[..., None])


def _has_sixteen_levels(groups: torch.Tensor) -> bool:
    """Whether the weights had 4 bits before, as a GGUF file's have: some groups tell."""
    some = groups.flatten(0, 1)
    some = some[:: max(1, len(some) // _GROUPS_LOOKED_AT)]
    values = some.sort(dim=1).values
    distinct = 1 + (values.diff(dim=1) != 0).sum(dim=1)
    return bool((distinct <= _LEVELS_4 + 1).all())


def _scales_of_levels(offsets: torch.Tensor, span: torch.Tensor) -> torch.Tensor:
    """Of groups that had levels: the steps between these, though the largest level may not occur.

    A span of n steps is tried for each n; without this a group whose weights use 12 of 16 levels
    would be rounded to others.
    """
    scales = (span / _LEVELS_4).to(torch.float16)
    least = torch.full_like(span, float("inf"))
    for steps in range(_LEVELS_4, 0, -1):
        tried = (span / steps).to(torch.float16)
        missed = (offsets - _nearest(offsets, tried) * tried.float()[..., None]).abs().amax(dim=2)
        better = missed < least
        scales = torch.where(better, tried, scales)
        least = torch.where(better, missed, least)
    return scales


def _nearest(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Levels of weights; 0 where a group's scale is."""
    steps = scales.float()[..., None]
    return torch.where(steps > 0, groups / steps, 0.0).round()


def _by_lanes(values: torch.Tensor) -> torch.Tensor:
    """[N, G, parts, bytes] -> [N / 16, G, parts * 16 * bytes], 16 outputs beside each other."""
    rows, groups, parts, width = values.shape
    lanes = values.view(rows // LANES, LANES, groups, parts, width).permute(0, 2, 3, 1, 4)
    return lanes.reshape(rows // LANES, groups, parts * LANES * width)
