"""Decoder layers with weights in 8 or 4 bits, compiled: norms, products, rotation, attention, MLP.

In SGLang's modules that is some 40 torch operators a layer, whose calls take longer than the
products of a few rows with such weights.

A row's numbers are a function of the row and of the weights alone, not of the rows beside it or of
the number of threads (as in group_kernel.py): decode, extend and verify give the same bits.

One function calls the others, and it alone is kept in numba's cache (as in attention_kernel.py).
"""

import math

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sglang_ext.cpu.addresses import address_of, four_addresses
from sglang_ext.cpu.attention_kernel import _attend
from sglang_ext.cpu.group_dots import GROUP, multiply_4, multiply_8, quantize
from sglang_ext.cpu.lane_vectors import LANES
from sglang_ext.cpu.vectors import dot

# Rows from which waking threads pays for what is done row by row.
_MANY_ROWS = 32

_LOG2E = np.float32(math.log2(math.e))
# Adding and subtracting 1.5 * 2^23 rounds a float32 to the nearest integer.
_ROUND = np.float32(12582912.0)
_LOWEST = np.float32(-126.0)
# 2^f on [-0.5, 0.5], as in attention_kernel.py.
_NODES = np.cos(np.pi * (np.arange(7) + 0.5) / 7) / 2
_C6, _C5, _C4, _C3, _C2, _C1, _C0 = (np.float32(c) for c in np.polyfit(_NODES, np.exp2(_NODES), 6))


@numba.njit(nogil=True)
def _multiply_1(bits, levels, scales, sums, weights, weight_scales, groups, out, row, column):
    rows, own = (address_of(levels, row),), (address_of(scales, row),)
    added, to = (address_of(sums, row),), (address_of(out, row) + np.uintp(4 * column),)
    if bits == 8:
        multiply_8(rows, own, added, weights, weight_scales, groups, to)
    else:
        multiply_4(rows, own, added, weights, weight_scales, groups, to)


@numba.njit(nogil=True)
def _multiply_tile(bits, levels, scales, sums, weights, weight_scales, groups, out, row, column):
    rows, to = four_addresses(levels, row, 0), four_addresses(out, row, 4 * column)
    own, added = four_addresses(scales, row, 0), four_addresses(sums, row, 0)
    if bits == 8:
        multiply_8(rows, own, added, weights, weight_scales, groups, to)
    else:
        multiply_4(rows, own, added, weights, weight_scales, groups, to)


@numba.njit(nogil=True)
def _multiply(bits, levels, scales, sums, weights, weight_scales, out, first, last):
    """All rows by the outputs of weights[first:last], written to out."""
    count, groups = levels.shape[0], weights.shape[1]
    for block in range(first, last):
        here, own = address_of(weights, block), address_of(weight_scales, block)
        row = 0
        while row + 4 <= count:
            _multiply_tile(bits, levels, scales, sums, here, own, groups, out, row, block * LANES)
            row += 4
        while row < count:
            _multiply_1(bits, levels, scales, sums, here, own, groups, out, row, block * LANES)
            row += 1


@numba.njit(fastmath={"contract", "nsz"}, nogil=True)
def _normed(x, weight, epsilon, out):
    """out = x / sqrt(mean(x^2) + epsilon) * weight, of one row."""
    size = x.size
    squares = dot(x.ctypes.data, x.ctypes.data, size)
    scale = np.float32(1) / np.sqrt(squares / np.float32(size) + epsilon)
    for i in range(size):
        out[i] = x[i] * scale * weight[i]


@numba.njit(nogil=True)
def _quantize_row(x, row, factor, levels, scales, sums):
    """x, a row of numbers, to levels[row]; its results are to be multiplied by factor."""
    own = scales[row]
    quantize(
        x.ctypes.data, own.size, address_of(levels, row), own.ctypes.data, address_of(sums, row)
    )
    for i in range(own.size):
        own[i] *= factor


@numba.njit(nogil=True)
def _norm_rows(x, weight, epsilon, factor, levels, scales, sums, first, last):
    normed = np.empty(x.shape[1], np.float32)
    for row in range(first, last):
        _normed(x[row], weight, epsilon, normed)
        _quantize_row(normed, row, factor, levels, scales, sums)


@numba.njit(fastmath={"contract", "nsz"}, nogil=True)
def _gated(gate, up, out, powers):
    """out = silu(gate) * up, of one row; powers is scratch, int32 of its size."""
    for i in range(gate.size):
        y = max(-abs(gate[i]) * _LOG2E, _LOWEST)
        whole = (y + _ROUND) - _ROUND
        f = y - whole
        p = _C6
        p = p * f + _C5
        p = p * f + _C4
        p = p * f + _C3
        p = p * f + _C2
        p = p * f + _C1
        p = p * f + _C0
        out[i] = p
        powers[i] = (np.int32(whole) + np.int32(127)) << np.int32(23)
    scales = powers.view(np.float32)
    for i in range(gate.size):
        small = out[i] * scales[i]  # exp(-|gate|)
        share = np.float32(1) if gate[i] >= 0 else small
        out[i] = gate[i] * up[i] * (share / (np.float32(1) + small))


@numba.njit(nogil=True)
def _gate_rows(both, size, factor, levels, scales, sums, first, last):
    made, powers = np.empty(size, np.float32), np.empty(size, np.int32)
    for row in range(first, last):
        _gated(both[row, :size], both[row, size : 2 * size], made, powers)
        _quantize_row(made, row, factor, levels, scales, sums)


@numba.njit(nogil=True)
def _rotated(x, position, cos_sin, halves, out):
    """A head x rotated at its position, to out; see rotary.py."""
    rotary = cos_sin.shape[1]
    half = rotary // 2
    for i in range(half):
        a = i if halves else 2 * i
        b = half + i if halves else 2 * i + 1
        cos, sin = cos_sin[position, i], cos_sin[position, half + i]
        out[a] = x[a] * cos - x[b] * sin
        out[b] = x[b] * cos + x[a] * sin
    for i in range(rotary, x.size):
        out[i] = x[i]


@numba.njit(nogil=True)
def _place_rows(made, bias, positions, cos_sin, halves, queries, keys, values, slots, first, last):
    """Rows of made [T, q, k and v] to queries, rotated, and to their slots of the KV pool."""
    heads, size = queries.shape[1], queries.shape[2]
    kv_heads = keys.shape[1]
    for row in range(first, last):
        here, slot, position = made[row], slots[row], positions[row]
        for i in range(bias.size):
            here[i] += bias[i]
        for head in range(heads):
            own = here[head * size : (head + 1) * size]
            _rotated(own, position, cos_sin, halves, queries[row, head])
        start = heads * size
        for head in range(kv_heads):
            own = here[start + head * size : start + (head + 1) * size]
            _rotated(own, position, cos_sin, halves, keys[slot, head])
        start += kv_heads * size
        for head in range(kv_heads):
            for i in range(size):
                values[slot, head, i] = here[start + head * size + i]


@numba.njit(nogil=True)
def _add_rows(x, more, bias, out, first, last):
    """out = x + more (+ bias); rows of more may be longer."""
    for row in range(first, last):
        for i in range(x.shape[1]):
            out[row, i] = x[row, i] + more[row, i]
        for i in range(bias.size):
            out[row, i] += bias[i]


@numba.njit(parallel=True, nogil=True)
def _project(
    bits, x, norm, epsilon, weights, weight_scales, factor, bias, positions, cos_sin, halves,
    queries, keys, values, slots, threads,
):  # fmt: skip
    """A layer's input to its queries, and to keys and values in the KV pool.

    Args:
        bits: 8 or 4, of the weights.
        x: [T, K] float32; norm [K], epsilon: the RMS norm before the attention.
        weights, weight_scales, factor: of the projection to q, k and v (group_weights.py).
        bias: float32 of its outputs, or empty.
        positions: [T] int64; cos_sin, halves: as rotary.py has them.
        queries: [T, H, D] float32, written.
        keys, values: [S, KH, D] float32, the layer's KV pool; slots [T] int64 are written.
        threads: how many share the work; the result does not depend on it.
    """
    count, groups, blocks = x.shape[0], weights.shape[1], weights.shape[0]
    levels = np.empty((count, groups * GROUP), np.int8)
    scales = np.empty((count, groups), np.float32)
    sums = np.empty((count, groups), np.int32)
    made = np.empty((count, blocks * LANES), np.float32)
    many = count >= _MANY_ROWS
    if many:
        for thread in numba.prange(threads):
            first, last = count * thread // threads, count * (thread + 1) // threads
            _norm_rows(x, norm, epsilon, factor, levels, scales, sums, first, last)
    else:
        _norm_rows(x, norm, epsilon, factor, levels, scales, sums, 0, count)
    for thread in numba.prange(threads):
        first, last = blocks * thread // threads, blocks * (thread + 1) // threads
        _multiply(bits, levels, scales, sums, weights, weight_scales, made, first, last)
    if many:
        for thread in numba.prange(threads):
            first, last = count * thread // threads, count * (thread + 1) // threads
            _place_rows(
                made, bias, positions, cos_sin, halves, queries, keys, values, slots, first, last
            )
    else:
        _place_rows(made, bias, positions, cos_sin, halves, queries, keys, values, slots, 0, count)


@numba.njit(parallel=True, nogil=True)
def _complete(
    bits, attended, x, o_weights, o_scales, o_factor, o_bias, norm, epsilon,
    up_weights, up_scales, up_factor, size, down_weights, down_scales, down_factor, out, threads,
):  # fmt: skip
    """From the attention's output to the layer's: output projection, norm and gated MLP.

    Args:
        bits: 8 or 4, of the weights.
        attended: [T, H * D] float32; x [T, K] float32: the layer's input.
        o_...: the output projection; up_...: to gate and up; down_...: behind them.
        norm: [K] float32; epsilon: the RMS norm before the MLP.
        size: of the gate, and as much of up.
        out: [T, K] float32, written: x and what attention and MLP add to it.
        threads: how many share the work; the result does not depend on it.
    """
    count = x.shape[0]
    widest = max(o_weights.shape[1], up_weights.shape[1], down_weights.shape[1])
    outputs = max(o_weights.shape[0], up_weights.shape[0], down_weights.shape[0]) * LANES
    levels = np.empty(count * widest * GROUP, np.int8)
    scales = np.empty(count * widest, np.float32)
    sums = np.empty(count * widest, np.int32)
    made = np.empty((count, outputs), np.float32)
    many = count >= _MANY_ROWS

    groups, blocks = o_weights.shape[1], o_weights.shape[0]
    levels_o = levels[: count * groups * GROUP].reshape(count, groups * GROUP)
    scales_o = scales[: count * groups].reshape(count, groups)
    sums_o = sums[: count * groups].reshape(count, groups)
    if many:
        for thread in numba.prange(threads):
            for row in range(count * thread // threads, count * (thread + 1) // threads):
                _quantize_row(attended[row], row, o_factor, levels_o, scales_o, sums_o)
    else:
        for row in range(count):
            _quantize_row(attended[row], row, o_factor, levels_o, scales_o, sums_o)
    for thread in numba.prange(threads):
        first, last = blocks * thread // threads, blocks * (thread + 1) // threads
        _multiply(bits, levels_o, scales_o, sums_o, o_weights, o_scales, made, first, last)

    groups, blocks = up_weights.shape[1], up_weights.shape[0]
    levels_up = levels[: count * groups * GROUP].reshape(count, groups * GROUP)
    scales_up = scales[: count * groups].reshape(count, groups)
    sums_up = sums[: count * groups].reshape(count, groups)
    if many:
        for thread in numba.prange(threads):
            first, last = count * thread // threads, count * (thread + 1) // threads
            _add_rows(x, made, o_bias, out, first, last)
            _norm_rows(out, norm, epsilon, up_factor, levels_up, scales_up, sums_up, first, last)
    else:
        _add_rows(x, made, o_bias, out, 0, count)
        _norm_rows(out, norm, epsilon, up_factor, levels_up, scales_up, sums_up, 0, count)
    for thread in numba.prange(threads):
        first, last = blocks * thread // threads, blocks * (thread + 1) // threads
        _multiply(bits, levels_up, scales_up, sums_up, up_weights, up_scales, made, first, last)

    groups, blocks = down_weights.shape[1], down_weights.shape[0]
    levels_down = levels[: count * groups * GROUP].reshape(count, groups * GROUP)
    scales_down = scales[: count * groups].reshape(count, groups)
    sums_down = sums[: count * groups].reshape(count, groups)
    if many:
        for thread in numba.prange(threads):
            first, last = count * thread // threads, count * (thread + 1) // threads
            _gate_rows(made, size, down_factor, levels_down, scales_down, sums_down, first, last)
    else:
        _gate_rows(made, size, down_factor, levels_down, scales_down, sums_down, 0, count)
    for thread in numba.prange(threads):
        first, last = blocks * thread // threads, blocks * (thread + 1) // threads
        _multiply(
            bits, levels_down, scales_down, sums_down, down_weights, down_scales, made, first, last
        )
    nothing = np.empty(0, np.float32)
    if many:
        for thread in numba.prange(threads):
            first, last = count * thread // threads, count * (thread + 1) // threads
            _add_rows(out, made, nothing, out, first, last)
    else:
        _add_rows(out, made, nothing, out, 0, count)


@intrinsic
def _pointer(typing_context, address):
    """An address as a pointer, for numba.carray."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@numba.njit(nogil=True)
def _floats(address, size):
    return numba.carray(_pointer(address), (size,), np.float32)


@numba.njit(nogil=True)
def _pool(address, slots, heads, size):
    return numba.carray(_pointer(address), (slots, heads, size), np.float32)


@numba.njit(nogil=True)
def _levels(address, blocks, groups, width):
    return numba.carray(_pointer(address), (blocks, groups, width), np.uint8)


@numba.njit(nogil=True)
def _scales(address, blocks, groups, width):
    return numba.carray(_pointer(address), (blocks, groups, width), np.uint16)


# Columns of `addresses` in `run_layers`: of a weight, four each; of a bias, two.
FIRST_NORM, SECOND_NORM, QKV, QKV_BIAS, OUT, OUT_BIAS, UP, DOWN = 0, 1, 2, 6, 8, 12, 14, 18
ADDRESSES = 22
# Columns of `numbers`: what norms add to the variance, and the factors of weights.
FIRST_EPSILON, QKV_FACTOR, OUT_FACTOR, SECOND_EPSILON, UP_FACTOR, DOWN_FACTOR = range(6)


@numba.njit(nogil=True, cache=True)
def run_layers(
    x, out, layers, numbers, bits, heads, kv_heads, size, gate_size, pools, pool_slots,
    positions, cos_sin, halves, slots, norm, epsilon, normed,
    table, rows, starts, counts, extra, extra_starts, extra_counts, scale, soft_cap,
    attention_threads, threads,
):  # fmt: skip
    """Layers one after the other, and the final norm behind them where there is one.

    Args:
        x: [T, K] float32, the residual stream; out: [T, K], written: what it is behind the layers.
        layers: [L, ADDRESSES] int64: addresses of float32 norms; of a weight the addresses of its
            levels and scales, its blocks of 16 outputs and groups of 32 inputs (group_weights.py);
            of a bias its address and size, 0 for none.
        numbers: [L, 6] float32.
        bits: 8 or 4; gate_size: of the MLP's gate.
        pools: [L, 2] int64, addresses of keys and of values, [pool_slots, kv_heads, size] float32.
        positions: [T] int64; cos_sin, halves: as rotary.py has them.
        slots: [T] int64, where keys and values are stored.
        norm: [K] float32, or empty; epsilon: its; normed: [T, K] float32, written where there is.
        table, ..., attention_threads: what each token sees, and how (attention_kernel.py).
        threads: how many share the work; the result does not depend on it.
    """
    count, columns = x.shape
    width, scale_width = (GROUP * LANES, LANES) if bits == 8 else (GROUP * LANES // 2, 2 * LANES)
    queries = np.empty((count, heads, size), np.float32)
    attended = np.empty((count, heads, size), np.float32)
    here = x
    for layer in range(layers.shape[0]):
        own, number = layers[layer], numbers[layer]
        keys = _pool(pools[layer, 0], pool_slots, kv_heads, size)
        values = _pool(pools[layer, 1], pool_slots, kv_heads, size)
        qkv, o, up, down = own[QKV:], own[OUT:], own[UP:], own[DOWN:]
        _project(
            bits, here, _floats(own[FIRST_NORM], columns), number[FIRST_EPSILON],
            _levels(qkv[0], qkv[2], qkv[3], width), _scales(qkv[1], qkv[2], qkv[3], scale_width),
            number[QKV_FACTOR], _floats(own[QKV_BIAS], own[QKV_BIAS + 1]),
            positions, cos_sin, halves, queries, keys, values, slots, threads,
        )  # fmt: skip
        _attend(
            queries, keys, values, attended, table, rows, starts, counts,
            extra, extra_starts, extra_counts, scale, soft_cap, attention_threads,
        )  # fmt: skip
        _complete(
            bits, attended.reshape(count, heads * size), here,
            _levels(o[0], o[2], o[3], width), _scales(o[1], o[2], o[3], scale_width),
            number[OUT_FACTOR], _floats(own[OUT_BIAS], own[OUT_BIAS + 1]),
            _floats(own[SECOND_NORM], columns), number[SECOND_EPSILON],
            _levels(up[0], up[2], up[3], width), _scales(up[1], up[2], up[3], scale_width),
            number[UP_FACTOR], gate_size,
            _levels(down[0], down[2], down[3], width),
            _scales(down[1], down[2], down[3], scale_width), number[DOWN_FACTOR], out, threads,
        )  # fmt: skip
        here = out
    if norm.size:
        for row in range(count):
            _normed(here[row], norm, epsilon, normed[row])
