"""Compiled products of float32 rows with 8- and 4-bit weights, of as many rows as there are.

One function calls the others, and it alone is kept in numba's cache (as in attention_kernel.py).
"""

import numba

from sglang_ext.cpu.group_rows import row_functions

# Rows from which waking threads pays to bring them to 8 bits.
_MANY_ROWS = 32

_empty_rows, _, _quantize_rows, _multiply = row_functions()


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
    count, blocks = x.shape[0], weights.shape[0]
    rows = _empty_rows(count, weights.shape[1])
    if count < _MANY_ROWS:
        _quantize_rows(x, bits, factor, rows, 0, count)
    else:
        for thread in numba.prange(threads):
            first, last = count * thread // threads, count * (thread + 1) // threads
            _quantize_rows(x, bits, factor, rows, first, last)
    for thread in numba.prange(threads):
        first, last = blocks * thread // threads, blocks * (thread + 1) // threads
        _multiply(bits, rows, (weights, weight_scales), out, first, last)
