"""A decoder layer of the block drafter as one compiled loop for CPUs, with weights in 8 bits.

Of torch that is some thirty operators, each of which takes 20 to 50 us between a target's passes,
whose weights have filled the caches.
One function calls the others, and it alone is kept in numba's cache (as in attention_kernel.py).
"""

import numba
import numpy as np

from sglang_ext.cpu.addresses import pointer_to
from sglang_ext.cpu.attention_kernel import _attend
from sglang_ext.cpu.group_rows import row_functions
from sglang_ext.cpu.vectors import dot, total

_BITS = 8
# Requests are shared among threads from so many on.
_MANY = 2

_empty_rows, _quantize_row, _quantize_rows, _multiply = row_functions((_BITS,))


@numba.njit(nogil=True)
def _norm_row(x, norm, epsilon, to):
    """to = x, float32[W], behind a layer norm; norm: float32[2, W], its weights and biases."""
    size = len(x)
    mean = total(x.ctypes.data, size) / np.float32(size)
    for i in range(size):
        to[i] = x[i] - mean
    squares = dot(to, to.ctypes.data, to.ctypes.data, size)
    scale = np.float32(1) / np.sqrt(squares / np.float32(size) + epsilon)
    for i in range(size):
        to[i] = to[i] * scale * norm[0, i] + norm[1, i]


@numba.njit(nogil=True)
def _norm_rows(x, norm, epsilon, factor, rows):
    """Rows x [T, W] behind a layer norm, to 8 bits."""
    size, groups = x.shape[1], rows[1].shape[1]
    normed = np.empty(size, np.float32)
    for row in range(len(x)):
        _norm_row(x[row], norm, epsilon, normed)
        _quantize_row(normed, row, 0, groups, _BITS, factor, rows)


@numba.njit(parallel=True, nogil=True)
def _outputs(rows, weight, threads):
    """float32[T, outputs] of rows in 8 bits; weight: (levels, scales, factor, bias)."""
    levels, scales, _, bias = weight
    blocks = len(levels)
    out = np.empty((len(rows[1]), 16 * blocks), np.float32)
    if threads == 1:
        _multiply(_BITS, rows, (levels, scales), out, 0, blocks)
    else:
        for thread in numba.prange(threads):
            first, last = blocks * thread // threads, blocks * (thread + 1) // threads
            _multiply(_BITS, rows, (levels, scales), out, first, last)
    for row in range(len(out)):
        for i in range(len(bias)):
            out[row, i] += bias[i]
    return out


@numba.njit(nogil=True)
def _of_normed(x, norm, epsilon, weight, threads):
    """float32[T, outputs]: x [T, W] behind a norm and a linear layer."""
    rows = _empty_rows(len(x), weight[0].shape[1])
    _norm_rows(x, norm, epsilon, weight[2], rows)
    return _outputs(rows, weight, threads)


@numba.njit(nogil=True)
def _linear(x, weight, threads):
    """float32[T, outputs or more]: x [T, K] behind a linear layer."""
    rows = _empty_rows(len(x), weight[0].shape[1])
    _quantize_rows(x, _BITS, weight[2], rows, 0, len(x))
    return _outputs(rows, weight, threads)


@numba.njit(nogil=True)
def _add_linear(x, inner, weight, threads):
    """x [T, W] += inner [T, K] behind a linear layer."""
    made = _linear(inner, weight, threads)
    for row in range(len(x)):
        for i in range(x.shape[1]):
            x[row, i] += made[row, i]


@numba.njit(nogil=True)
def _seen(queries, keys, values, starts, count, threads):
    """float32[T, heads, size], what queries find in `count` entries from their starts on."""
    tokens, none = len(queries), np.zeros(len(queries), np.int64)
    out = np.empty(queries.shape, np.float32)
    table = np.arange(len(keys)).astype(np.int32).reshape(1, len(keys))
    counts = np.full(tokens, count)
    _attend(
        queries, keys, values, out, table, none, starts, counts, np.zeros(1, np.int64), none, none,
        np.float32(1) / np.sqrt(np.float32(queries.shape[2])), np.float32(0), threads,
    )  # fmt: skip
    return out


@numba.njit(nogil=True)
def _read(queries, keys, values, count, out):
    """What a request's queries [k, heads, size] find in its memory, to out.

    Args:
        keys, values: addresses of float32[count, heads, size].
    """
    shape = (count, queries.shape[1], queries.shape[2])
    own = numba.carray(pointer_to(keys), shape, np.float32)
    theirs = numba.carray(pointer_to(values), shape, np.float32)
    out[:] = _seen(queries, own, theirs, np.zeros(len(queries), np.int64), count, 1)


@numba.njit(parallel=True, nogil=True)
def _read_all(queries, block, keys, values, counts, threads):
    """float32[n * block, heads, size]: `_read` of n requests, shared among threads."""
    out = np.empty(queries.shape, np.float32)
    n = len(counts)
    if threads == 1 or n < _MANY:
        for i in range(n):
            own = slice(i * block, (i + 1) * block)
            _read(queries[own], keys[i], values[i], counts[i], out[own])
        return out
    for thread in numba.prange(threads):
        for i in range(thread, n, threads):
            own = slice(i * block, (i + 1) * block)
            _read(queries[own], keys[i], values[i], counts[i], out[own])
    return out


@numba.njit(nogil=True, cache=True)
def run_layer(
    hidden, norms, epsilon, qkv, out, query, cross_out, first, second, keys, values, counts, heads,
    threads,
):  # fmt: skip
    """A layer of nn.TransformerDecoderLayer's kind, norms first, in place.

    Args:
        hidden: float32[n, k, width].
        norms: float32[3, 2, width], weights and biases; epsilon: what they add to variances.
        qkv, out: of the block's attention; query, cross_out: of the memory's; first, second: of the
            MLP. Each (levels, scales, factor) as group_weights.py has them, and a bias.
        keys, values: int64[n], addresses of a request's, float32[counts[n], heads, width / heads].
        threads: how many share the work.
    """
    n, k, width = hidden.shape
    x = hidden.reshape(n * k, width)
    shape = (n * k, heads, width // heads)
    made = _of_normed(x, norms[0], epsilon, qkv, threads)
    queries, own_keys, own_values = (
        made[:, :width].copy().reshape(shape),
        made[:, width : 2 * width].copy().reshape(shape),
        made[:, 2 * width : 3 * width].copy().reshape(shape),
    )
    starts = np.arange(n * k) // k * k
    seen = _seen(queries, own_keys, own_values, starts, k, threads)
    _add_linear(x, seen.reshape(n * k, width), out, threads)
    asked = _of_normed(x, norms[1], epsilon, query, threads)[:, :width].copy().reshape(shape)
    found = _read_all(asked, k, keys, values, counts, threads)
    _add_linear(x, found.reshape(n * k, width), cross_out, threads)
    inner = _of_normed(x, norms[2], epsilon, first, threads)
    for row in range(len(inner)):
        for i in range(inner.shape[1]):
            inner[row, i] = max(inner[row, i], np.float32(0))
    _add_linear(x, inner, second, threads)
