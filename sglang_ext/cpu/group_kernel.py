"""Compiled products of float32 rows with 8- and 4-bit weights, of as many rows as there are.

One function calls the others, and it alone is kept in numba's cache (as in attention_kernel.py).
"""

import numba
import numpy as np

from sglang_ext.cpu.addresses import address_of, four_addresses
from sglang_ext.cpu.group_dots import GROUP, multiply_4, multiply_8, quantize
from sglang_ext.cpu.lane_vectors import LANES

# Rows from which waking threads pays to bring them to 8 bits.
_MANY_ROWS = 32


@numba.njit(nogil=True)
def _tile_1(bits, levels, scales, sums, weights, weight_scales, groups, out, row, column):
    rows = (address_of(levels, row),)
    to = (address_of(out, row) + np.uintp(4 * column),)
    if bits == 8:
        multiply_8(
            rows,
            (address_of(scales, row),),
            (address_of(sums, row),),
            weights,
            weight_scales,
            groups,
            to,
        )
    else:
        multiply_4(
            rows,
            (address_of(scales, row),),
            (address_of(sums, row),),
            weights,
            weight_scales,
            groups,
            to,
        )


@numba.njit(nogil=True)
def _tile_4(bits, levels, scales, sums, weights, weight_scales, groups, out, row, column):
    rows, to = four_addresses(levels, row, 0), four_addresses(out, row, 4 * column)
    own, added = four_addresses(scales, row, 0), four_addresses(sums, row, 0)
    if bits == 8:
        multiply_8(rows, own, added, weights, weight_scales, groups, to)
    else:
        multiply_4(rows, own, added, weights, weight_scales, groups, to)


@numba.njit(nogil=True)
def _quantize_rows(x, levels, scales, sums, first, last):
    for row in range(first, last):
        groups = scales.shape[1]
        quantize(
            address_of(x, row),
            groups,
            address_of(levels, row),
            address_of(scales, row),
            address_of(sums, row),
        )


@numba.njit(parallel=True, nogil=True, cache=True)
def product(bits, x, weights, weight_scales, out, factor, threads):
    """x [M, K] float32 by packed weights: written to out [M, N] float32, N a multiple of 16.

    Args:
        bits: 8 or 4.
        weights: uint8[N / 16, K / 32, bytes of a group].
        weight_scales: uint16[N / 16, K / 32, ...], bits of float16.
        factor: of all results: a power of two, so that it rounds nothing.
        threads: how many share the work; the result does not depend on it.
    """
    count, groups = x.shape[0], weights.shape[1]
    levels = np.empty((count, groups * GROUP), np.int8)
    scales = np.empty((count, groups), np.float32)
    sums = np.empty((count, groups), np.int32)
    if count < _MANY_ROWS:
        _quantize_rows(x, levels, scales, sums, 0, count)
    else:
        for thread in numba.prange(threads):
            first, last = count * thread // threads, count * (thread + 1) // threads
            _quantize_rows(x, levels, scales, sums, first, last)
    scales *= np.float32(factor)
    blocks = weights.shape[0]
    for thread in numba.prange(threads):
        for block in range(blocks * thread // threads, blocks * (thread + 1) // threads):
            here, own = address_of(weights, block), address_of(weight_scales, block)
            row = 0
            while row + 4 <= count:
                _tile_4(bits, levels, scales, sums, here, own, groups, out, row, block * LANES)
                row += 4
            while row < count:
                _tile_1(bits, levels, scales, sums, here, own, groups, out, row, block * LANES)
                row += 1
