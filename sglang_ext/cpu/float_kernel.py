"""The compiled product of float32 rows with float32 or bfloat16 weights, of as many rows as are."""

import numba
import numpy as np

from sglang_ext.cpu.addresses import address_of
from sglang_ext.cpu.float_dots import BLOCKS, MOST_ROWS, MULTIPLY
from sglang_ext.cpu.lane_vectors import LANES

_32_first, _32_again = MULTIPLY[32, True], MULTIPLY[32, False]
_16_first, _16_again = MULTIPLY[16, True], MULTIPLY[16, False]
_LINE = np.uintp(4 * LANES)


@numba.njit(parallel=True, nogil=True, cache=True)
def product(bits, x, weights, bias, out, threads):
    """x [M, K] float32 by packed weights, plus bias: written to out [M, N] float32.

    Args:
        bits: of a weight, 32 or 16.
        weights: uint32[N / 16, K / inputs of a word, 16], as `float_dots` takes them; N a multiple
            of 16, at least 16 * BLOCKS.
        bias: float32[N].
        threads: how many share the work; the result does not depend on it.
    """
    count, blocks, lines = x.shape[0], weights.shape[0], np.uintp(weights.shape[1])
    turns = (blocks + BLOCKS - 1) // BLOCKS
    x_stride, out_stride = np.uintp(x.strides[0]), np.uintp(out.strides[0])
    stride = np.uintp(weights.strides[0])
    for thread in numba.prange(threads):
        for turn in range(turns * thread // threads, turns * (thread + 1) // threads):
            block = min(turn * BLOCKS, blocks - BLOCKS)  # the last ones may have had a turn
            here, behind = address_of(weights, block), np.uintp(block) * _LINE
            more, to = np.uintp(bias.ctypes.data) + behind, np.uintp(out.ctypes.data) + behind
            for row in range(0, count, MOST_ROWS):
                rows = min(MOST_ROWS, count - row)
                given, place = address_of(x, row), to + np.uintp(row) * out_stride
                if bits == 32 and row == 0:
                    _32_first(
                        rows, given, x_stride, here, stride, lines, more, place, out_stride
                    )  # fmt: skip
                elif bits == 32:
                    _32_again(
                        rows, given, x_stride, here, stride, lines, more, place, out_stride
                    )  # fmt: skip
                elif row == 0:
                    _16_first(
                        rows, given, x_stride, here, stride, lines, more, place, out_stride
                    )  # fmt: skip
                else:
                    _16_again(
                        rows, given, x_stride, here, stride, lines, more, place, out_stride
                    )  # fmt: skip
