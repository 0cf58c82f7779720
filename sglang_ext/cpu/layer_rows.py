"""Rows and weights of fused layers in any format: in groups of 32 with 8 or 4 bits, or in floats.

One function each for kernels, which look at the bits. Rows are (levels, scales, corrections,
floats): the first three as group_rows.py has them, for weights in 8 and 4 bits; floats
float32[T, K] for those in 32 and 16. What is not used is empty. Weights are (levels, scales), as
group_weights.py has them; of floats the words that float_kernel.py takes, as bytes, and nothing.

A form is (bits, address): what multiplies by weights of so many bits (`multiplier_of`).
"""

import functools
from typing import Any

import numba
import numpy as np
from numba import types

from sglang_ext.cpu.addresses import caller_of, pointer_to
from sglang_ext.cpu.float_kernel import block_multiplier, multiply_blocks
from sglang_ext.cpu.group_dots import GROUP
from sglang_ext.cpu.group_rows import row_functions
from sglang_ext.cpu.lane_vectors import LANES

FLOAT_BITS = 16
"""Weights of so many bits or more are floats."""

_, _quantize_row, _quantize_rows, _multiply_rows = row_functions()
_COUNT, _ADDRESS = types.int64, types.uintp
_SIGNATURE = types.void(
    _COUNT, _ADDRESS, _ADDRESS, _ADDRESS, _COUNT, _COUNT, _ADDRESS, _ADDRESS, _COUNT, _ADDRESS,
    _COUNT, _COUNT, _COUNT,
)  # fmt: skip


@numba.njit(nogil=True)
def packed_weight(bits, levels, scales, blocks, groups):
    """A weight at these addresses, of so many blocks of outputs and groups of inputs."""
    width, scale_width = GROUP * LANES * bits // 8, 2 * LANES if bits == 4 else LANES
    return (
        numba.carray(pointer_to(levels), (blocks, groups, width), np.uint8),
        numba.carray(pointer_to(scales), (blocks, groups, scale_width), np.uint16),
    )


def _multiply_groups(
    bits, levels, scales, corrections, count, groups, weights, weight_scales, blocks, out, width,
    first, last,
):  # fmt: skip
    """`group_rows`' product of `count` rows with the blocks first:last, by addresses.

    Args:
        out, width: address of float32[count, width].
    """
    rows = (
        numba.carray(pointer_to(levels), (count, groups * GROUP), np.int8),
        numba.carray(pointer_to(scales), (count, groups), np.float32),
        numba.carray(pointer_to(corrections), (count, groups), np.int32),
    )
    made = numba.carray(pointer_to(out), (count, width), np.float32)
    packed = packed_weight(bits, weights, weight_scales, blocks, groups)
    _multiply_rows(bits, rows, packed, made, first, last)


_call = caller_of(_SIGNATURE)


@functools.cache
def _group_multiplier() -> Any:
    return numba.cfunc(_SIGNATURE, cache=True)(_multiply_groups)


def multiplier_of(bits: int) -> int:
    """The address, in this process, of what multiplies by weights of so many bits."""
    return int((block_multiplier if bits >= FLOAT_BITS else _group_multiplier)().address)


@numba.njit(nogil=True)
def place_row(x, row, first, last, form, factor, rows):
    """x float32 becomes the groups first:last of a row."""
    if form[0] >= FLOAT_BITS:
        rows[3][row, first * GROUP : last * GROUP] = x
    else:
        _quantize_row(x, row, first, last, form[0], factor, (rows[0], rows[1], rows[2]))


@numba.njit(nogil=True)
def place_rows(x, form, factor, rows, first, last):
    """The rows first:last of x [T, K] float32 become those of rows."""
    if form[0] >= FLOAT_BITS:
        rows[3][first:last] = x[first:last]
    else:
        _quantize_rows(x, form[0], factor, (rows[0], rows[1], rows[2]), first, last)


@numba.njit(nogil=True)
def multiply(form, rows, weights, out, first, last):
    """All rows by the outputs of a weight's blocks first:last, to out [T, N] float32."""
    bits, function = form
    levels, scales = weights
    blocks, groups = levels.shape[0], levels.shape[1]
    if bits >= FLOAT_BITS:
        packed = levels.ctypes.data, blocks, groups * GROUP * bits // 32
        multiply_blocks(function, bits, rows[3], packed, 0, out, first, last)
        return
    _call(
        function, bits, rows[0].ctypes.data, rows[1].ctypes.data, rows[2].ctypes.data, out.shape[0],
        groups, levels.ctypes.data, scales.ctypes.data, blocks, out.ctypes.data, out.shape[1],
        first, last,
    )  # fmt: skip
