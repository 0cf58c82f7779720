"""Rows of float32 to 8 bits, and their products with weights in 8 or 4 bits, for numba kernels.

`row_functions` compiles them anew for each kernel: numba makes helpers that another function was
compiled with before half as fast.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from sglang_ext.cpu.addresses import address_of, four_addresses
from sglang_ext.cpu.group_dots import GROUP, multiply_4, multiply_8, quantize
from sglang_ext.cpu.lane_vectors import LANES

# Of a single pass over weights, whose next groups are asked for, so many groups before they are
# needed: a processor's own prefetching ends at a page.
_AHEAD = 8


def row_functions() -> tuple[Callable[..., Any], ...]:
    """Four compiled functions on rows in 8 bits: (levels int8[T, K], scales, corrections).

    The first, of (count, groups), makes room for so many. The second, of (x, row, first, last,
    bits, factor, rows), brings x float32 to 8 bits, as the groups first:last of a row (see
    `group_dots.quantize`).

    The third, of (x, bits, factor, rows, first, last), does so with the rows first:last of x whole.

    The fourth, of (bits, rows, weights, out, first, last), multiplies all rows by the outputs of a
    weight's blocks first:last, weights being (levels, scales) as group_weights.py has them, and
    writes out[:, 16 * first : 16 * last] float32.
    """

    @numba.njit(nogil=True)
    def empty_rows(count, groups):
        levels = np.empty((count, groups * GROUP), np.int8)
        scales = np.empty((count, groups), np.float32)
        return levels, scales, np.empty((count, groups), np.int32)

    @numba.njit(nogil=True)
    def quantize_row(x, row, first, last, bits, factor, rows):
        levels, scales, corrections = rows
        behind = np.uintp(4 * first)
        quantize(
            x.ctypes.data, last - first, bits, factor,
            address_of(levels, row) + np.uintp(GROUP * first),
            address_of(scales, row) + behind, address_of(corrections, row) + behind,
        )  # fmt: skip

    @numba.njit(nogil=True)
    def quantize_rows(x, bits, factor, rows, first, last):
        groups = rows[1].shape[1]
        for row in range(first, last):
            quantize_row(x[row], row, 0, groups, bits, factor, rows)

    @numba.njit(nogil=True)
    def ahead_of(turn, turns, weights, block):
        """What the turn-th pass over a block asks for: of several, the first two the next block."""
        levels, scales = weights
        here, own = address_of(levels, block), address_of(scales, block)
        size, scale_size = levels.strides[1], scales.strides[1]
        if turns == 1:
            soon = np.uintp(_AHEAD * size)
            return here + soon, np.uintp(size), own + np.uintp(_AHEAD * scale_size)
        if turn > 1:
            return here, np.uintp(0), own
        following = here + np.uintp(levels.strides[0] + turn * (levels.strides[0] // 2))
        return following, np.uintp(size // 2), own + np.uintp(scales.strides[0])

    @numba.njit(nogil=True)
    def one_row(rows, row, out, column):
        levels, scales, corrections = rows
        return (
            (address_of(levels, row),), (address_of(scales, row),), (address_of(corrections, row),),
            (address_of(out, row) + np.uintp(column),),
        )  # fmt: skip

    @numba.njit(nogil=True)
    def four_rows(rows, row, out, column):
        levels, scales, corrections = rows
        return (
            four_addresses(levels, row, 0), four_addresses(scales, row, 0),
            four_addresses(corrections, row, 0), four_addresses(out, row, column),
        )  # fmt: skip

    @numba.njit(nogil=True)
    def multiply_some(bits, some, groups, weights, block, ahead):
        levels, scales, corrections, to = some
        here, own = address_of(weights[0], block), address_of(weights[1], block)
        if bits == 8:
            multiply_8(levels, scales, corrections, here, own, groups, ahead, to)
        else:
            multiply_4(levels, scales, corrections, here, own, groups, ahead, to)

    @numba.njit(nogil=True)
    def multiply(bits, rows, weights, out, first, last):
        count, groups = rows[1].shape
        fours = count // 4
        turns = fours + count % 4
        for block in range(first, last):
            column = 4 * LANES * block
            for turn in range(turns):
                ahead = ahead_of(turn, turns, weights, block)
                if turn < fours:
                    some = four_rows(rows, 4 * turn, out, column)
                    multiply_some(bits, some, groups, weights, block, ahead)
                else:
                    one = one_row(rows, turn + 3 * fours, out, column)
                    multiply_some(bits, one, groups, weights, block, ahead)

    return empty_rows, quantize_row, quantize_rows, multiply
