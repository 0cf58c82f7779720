"""Rows of float32 to 8 bits, and their products with weights in 8 or 4 bits, for numba kernels.

`row_functions` compiles them anew for each kernel: numba makes helpers that another function was
compiled with before half as fast.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
from numba.core.registry import cpu_target

from sglang_ext.cpu import group_dots
from sglang_ext.cpu.addresses import address_of
from sglang_ext.cpu.group_dots import GROUP, multiplier, quantize
from sglang_ext.cpu.lane_vectors import LANES

# Of a single pass over weights, whose next groups are asked for, so many groups before they are
# needed: a processor's own prefetching ends at a page. 16 to 96 were tried: from 32 on a token
# took a tenth less than with 8, with 64 a sixth.
_AHEAD = np.uintp(64)


# Rows that one pass over weights multiplies, at most: as many as registers hold two sums of.
_MOST_AT_ONCE, _MOST_AT_ONCE_WIDE = 4, 12


def row_functions(formats: Sequence[int] = (4, 8)) -> tuple[Callable[..., Any], ...]:
    """Four compiled functions on rows in 8 bits: (levels int8[T, K], scales, corrections).

    Args:
        formats: bits of the weights that rows are multiplied by; fewer compile in less time.

    Rows that one pass multiplies, a tile, lie side by side, group by group (`group_dots`); a tile
    begins where it would if rows lay one behind the other.

    The first, of (count, groups), makes room for so many. The second, of (x, row, first, last,
    bits, factor, rows), brings x float32 to 8 bits, as the groups first:last of a row (see
    `group_dots.quantize`).

    The third, of (x, bits, factor, rows, first, last), does so with the rows first:last of x whole.

    The fourth, of (bits, rows, weights, out, first, last), multiplies all rows by the outputs of a
    weight's blocks first:last, weights being (levels, scales) as group_weights.py has them, and
    writes out[:, 16 * first : 16 * last] float32.
    """
    features = group_dots.features_of(cpu_target.target_context)
    most = _MOST_AT_ONCE_WIDE if "avx512f" in features else _MOST_AT_ONCE
    multiply_tile = _by_size(most, formats)

    @numba.njit(nogil=True)
    def empty_rows(count, groups):
        levels = np.empty((count, groups * GROUP), np.int8)
        scales = np.empty((count, groups), np.float32)
        return levels, scales, np.empty((count, groups), np.int32)

    @numba.njit(nogil=True)
    def tile_of(row, count):
        """Where a row's tile begins, and how many rows it has."""
        start = row // most * most
        return start, min(most, count - start)

    @numba.njit(nogil=True)
    def quantize_row(x, row, first, last, bits, factor, rows):
        levels, scales, corrections = rows
        start, size = tile_of(row, scales.shape[0])
        place = first * size + row - start
        behind = np.uintp(4 * place)
        quantize(
            x.ctypes.data, last - first, bits, factor,
            address_of(levels, start) + np.uintp(GROUP * place),
            address_of(scales, start) + behind, address_of(corrections, start) + behind, size,
        )  # fmt: skip

    @numba.njit(nogil=True)
    def quantize_rows(x, bits, factor, rows, first, last):
        groups = rows[1].shape[1]
        for row in range(first, last):
            quantize_row(x[row], row, 0, groups, bits, factor, rows)

    @numba.njit(nogil=True)
    def ahead_of(turn, turns, here, own, groups, size, scale_size):
        """What the turn-th pass over a block asks for: of several, the first two the next block.

        The block has weights at address `here`, their scales at `own`, in groups of so many bytes.
        """
        if turns == 1:
            return here + _AHEAD * size, size, own + _AHEAD * scale_size
        if turn > 1:
            return here, np.uintp(0), own
        half = size // np.uintp(2)
        following = here + groups * size + np.uintp(turn) * groups * half
        return following, half, own + groups * scale_size

    @numba.njit(nogil=True)
    @_of(most, formats)
    def multiply(bits, rows, weights, out, first, last):
        # Numbers instead of arrays: handing on an array takes as long as a row's product.
        count, groups = rows[1].shape[0], np.uintp(rows[1].shape[1])
        size, scale_size = np.uintp(weights[0].strides[1]), np.uintp(weights[1].strides[1])
        stride = np.uintp(out.strides[0])
        turns = -(-count // most)
        for block in range(first, last):
            here, own = address_of(weights[0], block), address_of(weights[1], block)
            to = address_of(out, 0) + np.uintp(4 * LANES * block)
            for turn in range(turns):
                start, tile = tile_of(turn * most, count)
                behind = np.uintp(start) * groups
                multiply_tile(
                    tile, bits, address_of(rows[0], 0) + GROUP * behind,
                    address_of(rows[1], 0) + 4 * behind, address_of(rows[2], 0) + 4 * behind,
                    here, own, groups,
                    ahead_of(turn, turns, here, own, groups, size, scale_size),
                    to + np.uintp(start) * stride, stride,
                )  # fmt: skip

    return empty_rows, quantize_row, quantize_rows, multiply


def _by_size(most: int, formats: Sequence[int]) -> Callable[..., Any]:
    """What multiplies a tile of up to `most` rows by weights in one of the formats."""
    multiply = _in_formats(most, formats)
    if most == 1:
        return multiply
    fewer = _by_size(most - 1, formats)

    @numba.njit(nogil=True)
    @_of(most, formats)
    def multiply_tile(
        size, bits, levels, scales, corrections, weights, own, groups, ahead, to, stride
    ):  # fmt: skip
        if size == most:
            multiply(
                size, bits, levels, scales, corrections, weights, own, groups, ahead, to, stride
            )  # fmt: skip
        else:
            fewer(
                size, bits, levels, scales, corrections, weights, own, groups, ahead, to, stride
            )  # fmt: skip

    return multiply_tile


def _in_formats(most: int, formats: Sequence[int]) -> Callable[..., Any]:
    """What multiplies `most` rows."""
    made = [multiplier(bits, most) for bits in sorted(formats)]
    multiply_4, multiply_8 = made[0], made[-1]

    @numba.njit(nogil=True)
    @_of(most, formats)
    def multiply_one(
        size, bits, levels, scales, corrections, weights, own, groups, ahead, to, stride
    ):  # fmt: skip
        multiply_8(levels, scales, corrections, weights, own, groups, ahead, to, stride)

    @numba.njit(nogil=True)
    @_of(most, formats)
    def multiply(
        size, bits, levels, scales, corrections, weights, own, groups, ahead, to, stride
    ):  # fmt: skip
        if bits == 8:
            multiply_8(levels, scales, corrections, weights, own, groups, ahead, to, stride)
        else:
            multiply_4(levels, scales, corrections, weights, own, groups, ahead, to, stride)

    return multiply if len(made) > 1 else multiply_one


def _of(rows: int, formats: Sequence[int]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: a function of at most so many rows and these formats gets a name that says so.

    numba names compiled code by a function's qualified name and a count of the process. Of two
    functions of one name, compiled by two processes and loaded from their caches by a third, one
    may be called for the other.
    """

    def named(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__qualname__ += "_".join(map(str, ["", rows, *sorted(formats)]))
        return function

    return named
