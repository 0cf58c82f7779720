"""The compiled product of float32 rows with bfloat16 weights, of as many rows as there are."""

import numba
import numpy as np

from sglang_ext.cpu.addresses import address_of, four_addresses
from sglang_ext.cpu.bf16_dots import multiply_bf16
from sglang_ext.cpu.lane_vectors import LANES


@numba.njit(nogil=True)
def _tile_1(x, weights, pairs, out, row, column):
    multiply_bf16(
        (address_of(x, row),), weights, pairs, (address_of(out, row) + np.uintp(4 * column),)
    )


@numba.njit(nogil=True)
def _tile_4(x, weights, pairs, out, row, column):
    multiply_bf16(four_addresses(x, row, 0), weights, pairs, four_addresses(out, row, 4 * column))


@numba.njit(parallel=True, nogil=True, cache=True)
def product(x, weights, out, threads):
    """x [M, K] float32 by packed weights: written to out [M, N] float32, N a multiple of 16.

    Args:
        weights: uint32[N / 16, K / 2, 16], as `multiply_bf16` takes them.
        threads: how many share the work; the result does not depend on it.
    """
    count, blocks, pairs = x.shape[0], weights.shape[0], weights.shape[1]
    for thread in numba.prange(threads):
        for block in range(blocks * thread // threads, blocks * (thread + 1) // threads):
            here = address_of(weights, block)
            row = 0
            while row + 4 <= count:
                _tile_4(x, here, pairs, out, row, block * LANES)
                row += 4
            while row < count:
                _tile_1(x, here, pairs, out, row, block * LANES)
                row += 1
