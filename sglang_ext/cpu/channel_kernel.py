"""Compiled ends of an 8-bit product by channels: rows to levels before it, sums to floats after.

Each is a pass over memory, so it is shared among threads; no row's result depends on another's.
What is called from here alone is compiled anew, and not kept in numba's cache by itself (as in
attention_kernel.py).
"""

import numba
import numpy as np

_SIGN_OFF = np.int32(0x7FFFFFFF)
# The bits of infinity: those of larger magnitudes are NaN's.
_INFINITE = np.int32(0x7F800000)
_LEVELS = np.float32(127)
# Rows of magnitudes below are zeros: the quotients of smaller ones overflow.
_LEAST = np.float32(1e-30)
# Adding and subtracting 1.5 * 2^23 rounds a float32 to the nearest integer.
_ROUND = np.float32(12582912.0)


@numba.njit(nogil=True)
def _largest_bits(row):
    """Of the magnitudes of a row, given as int32: their order is that of floats, NaN above all."""
    most = np.int32(0)
    for column in range(row.size):
        most = max(most, np.int32(row[column] & _SIGN_OFF))
    return most


@numba.njit(nogil=True)
def _quantize(x, bits, levels):
    """A row's levels, written; gives its scale."""
    most = _largest_bits(bits)
    if most >= _INFINITE:
        levels[:] = 0
        return np.float32(np.nan)
    largest = np.int32(most).view(np.float32)
    steps = _LEVELS / largest if largest > _LEAST else np.float32(0)
    for column in range(x.size):
        levels[column] = np.int8(np.int32((x[column] * steps + _ROUND) - _ROUND))
    return largest / _LEVELS


@numba.njit(parallel=True, nogil=True, cache=True)
def quantize_rows(x, bits, levels, scales, threads):
    """Bring float32 rows to 8 bits: x[i] is about levels[i] * scales[i].

    Args:
        x: float32[M, K].
        bits: int32[M, K], the same memory.
        levels: int8[at least M, K], written to: -127 to 127; 0 for a row that is not finite.
        scales: float32[M], written to: the row's largest magnitude / 127; NaN: it is not finite.
        threads: how many share the work; the result does not depend on it.
    """
    rows = len(x)
    for thread in numba.prange(threads):
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            scales[row] = _quantize(x[row], bits[row], levels[row])


@numba.njit(parallel=True, nogil=True, cache=True)
def scale_sums(sums, scales, channel_scales, bias, out, threads):
    """Write sums[i, n] * (scales[i] * channel_scales[n]) + bias[n] to out.

    Args:
        sums: int32[at least M, N].
        scales: float32[M], of rows.
        channel_scales: float32[N].
        bias: float32[N].
        out: float32[M, N].
        threads: how many share the work; the result does not depend on it.
    """
    rows, columns = out.shape
    for thread in numba.prange(threads):
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            scale = scales[row]
            for column in range(columns):
                factor = scale * channel_scales[column]
                out[row, column] = np.float32(sums[row, column]) * factor + bias[column]
