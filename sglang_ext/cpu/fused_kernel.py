"""Decoder layers, compiled: norms, products, rotation, attention, MLP.

In SGLang's modules that is some 40 torch operators a layer, whose calls take longer than a small
model's products of a few rows.

A row's numbers are a function of the row and of the weights alone, not of the rows beside it or of
the number of threads (as in group_kernel.py): decode, extend and verify give the same bits.

One function calls the others, and it alone is kept in numba's cache (as in attention_kernel.py).
"""

import numba
import numpy as np

from sglang_ext.cpu.addresses import pointer_to
from sglang_ext.cpu.attention_kernel import _attend
from sglang_ext.cpu.group_dots import GROUP
from sglang_ext.cpu.lane_vectors import LANES
from sglang_ext.cpu.layer_rows import multiply, packed_weight, place_row, place_rows
from sglang_ext.cpu.vectors import dot, gated, store_row

# Rows from which waking threads pays for what is done row by row.
_MANY_ROWS = 32


@numba.njit(fastmath={"contract", "nsz"}, nogil=True)
def _normed(x, weight, epsilon, out):
    """out = x / sqrt(mean(x^2) + epsilon) * weight, of one row."""
    size = x.size
    squares = dot(x, x.ctypes.data, x.ctypes.data, size)
    scale = np.float32(1) / np.sqrt(squares / np.float32(size) + epsilon)
    for i in range(size):
        out[i] = x[i] * scale * weight[i]


@numba.njit(nogil=True)
def _norm_rows(x, weight, epsilon, form, factor, made, first, last):
    normed, groups = np.empty(x.shape[1], np.float32), x.shape[1] // GROUP
    for row in range(first, last):
        _normed(x[row], weight, epsilon, normed)
        place_row(normed, row, 0, groups, form, factor, made)


@numba.njit(nogil=True)
def _gate_groups(both, size, form, factor, made, first, last):
    """silu(gate) * up of rows both [T, gate and up], as the groups first:last of made."""
    start, end = first * GROUP, last * GROUP
    own = np.empty(end - start, np.float32)
    for row in range(both.shape[0]):
        here = both[row].ctypes.data
        up = np.uintp(here + 4 * (size + start))
        gated(np.uintp(here + 4 * start), up, own.ctypes.data, end - start)
        place_row(own, row, first, last, form, factor, made)


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
    # Without owners: each of a row's heads would be counted, which takes longer than turning it.
    made = numba.carray(pointer_to(np.uintp(made.ctypes.data)), made.shape, np.float32)
    queries = numba.carray(pointer_to(np.uintp(queries.ctypes.data)), queries.shape, np.float32)
    turned = np.empty(size, np.float32)
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
            _rotated(own, position, cos_sin, halves, turned)
            store_row(keys, np.uintp(keys[slot, head].ctypes.data), turned.ctypes.data, size)
        start += kv_heads * size
        for head in range(kv_heads):
            own = here[start + head * size : start + (head + 1) * size]
            store_row(values, np.uintp(values[slot, head].ctypes.data), own.ctypes.data, size)


@numba.njit(nogil=True)
def _add_rows(x, more, bias, out, first, last):
    """out = x + more (+ bias); rows of more may be longer."""
    for row in range(first, last):
        for i in range(x.shape[1]):
            out[row, i] = x[row, i] + more[row, i]
        for i in range(bias.size):
            out[row, i] += bias[i]


@numba.njit(parallel=True, nogil=True)
def _product(form, rows, weights, out, threads):
    """All of `multiply`, shared by threads; by one alone nobody is woken."""
    blocks = weights[0].shape[0]
    if threads == 1:
        multiply(form, rows, weights, out, 0, blocks)
        return
    for thread in numba.prange(threads):
        first, last = blocks * thread // threads, blocks * (thread + 1) // threads
        multiply(form, rows, weights, out, first, last)


@numba.njit(parallel=True, nogil=True)
def _project(
    form, x, norm, epsilon, weights, factor, bias, positions, cos_sin, halves,
    queries, keys, values, slots, rows, made, threads, small_threads,
):  # fmt: skip
    """A layer's input to its queries, and to keys and values in the KV pool.

    Args:
        form: of the weights (layer_rows.py).
        x: [T, K] float32; norm [K], epsilon: the RMS norm before the attention.
        weights, factor: of the projection to q, k and v, as layer_rows.py has them.
        bias: float32 of its outputs, or empty.
        positions: [T] int64; cos_sin, halves: as rotary.py has them.
        queries: [T, H, D] float32, written.
        keys, values: [S, KH, D], the layer's KV pool (attention_kernel.py); slots [T] int64 are
            written.
        rows, made: written: the rows (layer_rows.py), and what the projection makes of them.
        threads, small_threads: how many share the work, and the product; the result does not
            depend on it.
    """
    count = x.shape[0]
    many = count >= _MANY_ROWS
    if many:
        for thread in numba.prange(threads):
            first, last = count * thread // threads, count * (thread + 1) // threads
            _norm_rows(x, norm, epsilon, form, factor, rows, first, last)
    else:
        _norm_rows(x, norm, epsilon, form, factor, rows, 0, count)
    _product(form, rows, weights, made, small_threads)
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
    form, attended, x, o_weights, o_factor, o_bias, norm, epsilon,
    up_weights, up_factor, down_weights, down_factor, out, room, threads, small_threads,
):  # fmt: skip
    """From the attention's output to the layer's: output projection, norm and gated MLP.

    Args:
        form: as `_project` takes them.
        attended: [T, H * D] float32; x [T, K] float32: the layer's input.
        o_...: the output projection; up_...: to gate and up, as many each; down_...: behind them.
            Weights are as layer_rows.py has them.
        norm: [K] float32; epsilon: the RMS norm before the MLP.
        out: [T, K] float32, written: x and what attention and MLP add to it.
        room: written: rows for each product, gate and up, and what products add to x.
        threads, small_threads: how many share the work, and the output projection; the result
            does not depend on it.
    """
    count = x.shape[0]
    rows, rows_up, rows_down, made, added = room
    many = count >= _MANY_ROWS
    if many:
        for thread in numba.prange(threads):
            first, last = count * thread // threads, count * (thread + 1) // threads
            place_rows(attended, form, o_factor, rows, first, last)
    else:
        place_rows(attended, form, o_factor, rows, 0, count)
    _product(form, rows, o_weights, added, small_threads)
    if many:
        for thread in numba.prange(threads):
            first, last = count * thread // threads, count * (thread + 1) // threads
            _add_rows(x, added, o_bias, out, first, last)
            _norm_rows(out, norm, epsilon, form, up_factor, rows_up, first, last)
    else:
        _add_rows(x, added, o_bias, out, 0, count)
        _norm_rows(out, norm, epsilon, form, up_factor, rows_up, 0, count)
    # A thread has the gate and up of the same groups, and makes them the next product's rows.
    groups = down_weights[0].shape[1]
    size, half = groups * GROUP, groups * (GROUP // LANES)
    for thread in numba.prange(threads):
        first, last = groups * thread // threads, groups * (thread + 1) // threads
        start, end = first * (GROUP // LANES), last * (GROUP // LANES)
        multiply(form, rows_up, up_weights, made, start, end)
        multiply(form, rows_up, up_weights, made, half + start, half + end)
        _gate_groups(made, size, form, down_factor, rows_down, first, last)

    _product(form, rows_down, down_weights, added, threads)
    nothing = np.empty(0, np.float32)
    if many:
        for thread in numba.prange(threads):
            first, last = count * thread // threads, count * (thread + 1) // threads
            _add_rows(out, added, nothing, out, first, last)
    else:
        _add_rows(out, added, nothing, out, 0, count)


@numba.njit(nogil=True)
def _floats(address, size):
    return numba.carray(pointer_to(address), (size,), np.float32)


@numba.njit(nogil=True)
def _pool(like, address, slots, heads, size):
    return numba.carray(pointer_to(address), (slots, heads, size), like.dtype)


@numba.njit(nogil=True)
def _weights(form, own):
    """A weight, of its four columns of `layers`."""
    return packed_weight(form[0], own[0], own[1], own[2], own[3])


# Columns of `addresses` in `run_layers`: of a weight, four each; of a bias, two.
FIRST_NORM, SECOND_NORM, QKV, QKV_BIAS, OUT, OUT_BIAS, UP, DOWN = 0, 1, 2, 6, 8, 12, 14, 18
ADDRESSES = 22
# Columns of `numbers`: what norms add to the variance, and the factors of weights.
FIRST_EPSILON, QKV_FACTOR, OUT_FACTOR, SECOND_EPSILON, UP_FACTOR, DOWN_FACTOR = range(6)


@numba.njit(nogil=True, cache=True)
def run_layers(
    x, out, room, layers, numbers, form, heads, kv_heads, size, pools, pool_slots, like,
    positions, cos_sin, halves, slots, norm, epsilon, normed,
    table, rows, starts, counts, extra, extra_starts, extra_counts, scale, soft_cap,
    attention_threads, threads, small_threads,
):  # fmt: skip
    """Layers one after the other, and the final norm behind them where there is one.

    Args:
        x: [T, K] float32, the residual stream; out: [T, K], written: what it is behind the layers.
        room: what is in between (layer_room.py), written.
        layers: [L, ADDRESSES] int64: addresses of float32 norms; of a weight (layer_rows.py) the
            addresses of its levels and scales, its blocks of 16 outputs and groups of 32 inputs; of
            a bias its address and size, 0 for none.
        numbers: [L, 6] float32.
        form: of the weights (layer_rows.py): their bits, and what multiplies by them.
        pools: [L, 2] int64, addresses of keys and of values, [pool_slots, kv_heads, size].
        like: any array of their dtype, float32 or uint16 with the bits of bfloat16.
        positions: [T] int64; cos_sin, halves: as rotary.py has them.
        slots: [T] int64, where keys and values are stored.
        norm: [K] float32, or empty; epsilon: its; normed: [T, K] float32, written where there is.
        table, ..., attention_threads: what each token sees, and how (attention_kernel.py).
        threads: how many share the work; the result does not depend on it.
        small_threads: how many share the projections around the attention: 1 where it costs more to
            wake others.
    """
    count, columns = x.shape
    queries, attended, rows_qkv, made_qkv, rows_o, rows_up, rows_down, both, added = room
    room_behind = rows_o, rows_up, rows_down, both, added
    here = x
    for layer in range(layers.shape[0]):
        own, number = layers[layer], numbers[layer]
        keys = _pool(like, pools[layer, 0], pool_slots, kv_heads, size)
        values = _pool(like, pools[layer, 1], pool_slots, kv_heads, size)
        _project(
            form, here, _floats(own[FIRST_NORM], columns), number[FIRST_EPSILON],
            _weights(form, own[QKV:]), number[QKV_FACTOR],
            _floats(own[QKV_BIAS], own[QKV_BIAS + 1]),
            positions, cos_sin, halves, queries, keys, values, slots, rows_qkv, made_qkv, threads,
            small_threads,
        )  # fmt: skip
        _attend(
            queries, keys, values, attended, table, rows, starts, counts,
            extra, extra_starts, extra_counts, scale, soft_cap, attention_threads,
        )  # fmt: skip
        _complete(
            form, attended.reshape(count, heads * size), here,
            _weights(form, own[OUT:]), number[OUT_FACTOR],
            _floats(own[OUT_BIAS], own[OUT_BIAS + 1]),
            _floats(own[SECOND_NORM], columns), number[SECOND_EPSILON],
            _weights(form, own[UP:]), number[UP_FACTOR],
            _weights(form, own[DOWN:]), number[DOWN_FACTOR], out, room_behind, threads,
            small_threads,
        )  # fmt: skip
        here = out
    if norm.size:
        for row in range(count):
            _normed(here[row], norm, epsilon, normed[row])
