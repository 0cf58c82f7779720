"""The compiled product of float32 rows with float32 or bfloat16 weights, of as many rows as are."""

import functools
from typing import Any

import numba
import numpy as np
from numba import types

from sglang_ext.cpu.addresses import caller_of
from sglang_ext.cpu.float_dots import BLOCKS, MOST_ROWS, MULTIPLY
from sglang_ext.cpu.lane_vectors import LANES

_32_first, _32_again = MULTIPLY[32, True], MULTIPLY[32, False]
_16_first, _16_again = MULTIPLY[16, True], MULTIPLY[16, False]
_LINE = np.uintp(4 * LANES)


_COUNT, _ADDRESS = types.int64, types.uintp
_SIGNATURE = types.void(
    _COUNT, _ADDRESS, _ADDRESS, _COUNT, _ADDRESS, _COUNT, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS,
    _COUNT, _COUNT,
)  # fmt: skip


def _multiply_blocks(
    bits, x, x_stride, count, weights, blocks, lines, bias, out, out_stride, first, last
):  # fmt: skip
    """Rows by the blocks first:last of packed weights, plus bias: to their outputs.

    The block behind these may be written too, what belongs there.

    Args:
        bits: of a weight, 32 or 16.
        x, x_stride, count: address of float32[count, K], and a row's bytes.
        weights, blocks, lines: their address, their blocks, and the lines of a block.
        bias: address of float32[N]; 0: none.
        out, out_stride: address of float32[count, N], and a row's bytes.
    """
    stride = lines * _LINE
    for turn in range(first, last, BLOCKS):
        block = np.uintp(min(turn, blocks - BLOCKS))  # the last ones may have had a turn
        own, behind = weights + block * stride, block * _LINE
        more = bias + behind if bias else bias
        for row in range(0, count, MOST_ROWS):
            rows, at = min(MOST_ROWS, count - row), np.uintp(row)
            given, to = x + at * x_stride, out + at * out_stride + behind
            if bits == 32 and row == 0:
                _32_first(rows, given, x_stride, own, stride, lines, more, to, out_stride)
            elif bits == 32:
                _32_again(rows, given, x_stride, own, stride, lines, more, to, out_stride)
            elif row == 0:
                _16_first(rows, given, x_stride, own, stride, lines, more, to, out_stride)
            else:
                _16_again(rows, given, x_stride, own, stride, lines, more, to, out_stride)


@functools.cache
def block_multiplier() -> Any:
    """`_multiply_blocks`, compiled when it is first asked for; its `address` is this process's."""
    return numba.cfunc(_SIGNATURE, cache=True)(_multiply_blocks)


_call = caller_of(_SIGNATURE)


@numba.njit(nogil=True)
def multiply_blocks(function, bits, x, weights, bias, out, first, last):
    """x [M, K] float32 by the blocks first:last of packed weights: to out [M, N] float32.

    Args:
        function: address of `block_multiplier`.
        bits, bias, first, last: as `_multiply_blocks` takes them.
        weights: their address, their blocks, and the lines of a block.
    """
    _call(
        function, bits, x.ctypes.data, x.strides[0], x.shape[0], weights[0], weights[1], weights[2],
        bias, out.ctypes.data, out.strides[0], first, last,
    )  # fmt: skip


@numba.njit(parallel=True, nogil=True, cache=True)
def product(function, bits, x, weights, bias, out, threads):
    """x [M, K] float32 by packed weights, plus bias: written to out [M, N] float32.

    Args:
        function: address of `block_multiplier`.
        bits: of a weight, 32 or 16.
        weights: uint32[N / 16, K / inputs of a word, 16], as `float_dots` takes them; N a multiple
            of 16, at least 16 * BLOCKS.
        bias: float32[N], or empty.
        threads: how many share the work; the result does not depend on it.
    """
    blocks = weights.shape[0]
    packed = weights.ctypes.data, blocks, weights.shape[1]
    more = bias.ctypes.data if bias.size else 0
    for thread in numba.prange(threads):
        first, last = blocks * thread // threads, blocks * (thread + 1) // threads
        multiply_blocks(function, bits, x, packed, more, out, first, last)
