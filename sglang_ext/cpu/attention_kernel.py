"""Paged attention for CPUs: one compiled loop for decode, extend, verify and cross-attention.

Every query token names the cache slots it sees: `count` entries of its request's row in the slot
table, then a short list of extra slots (its ancestors in a draft tree, itself included). The loop
reads K and V through these slots; nothing is gathered or padded. A token's output is a function of
its query and of the visible K/V in order, and of nothing else in the batch: the same token gets the
same bits from decode, extend and verify. Sums are in fp32.

One function calls the others, and it alone is kept in numba's cache: helpers that come from the
cache, or that another function was compiled with before, make the loop half as fast.

numba and not torch: at batch 1 a gather per layer costs more than the attention itself, and SDPA's
order of sums changes with the shape it is given.
"""

import math

import numba
import numpy as np

from sglang_ext.cpu.vectors import LANES, add_rows, dot, dots, prefetch

_LOG2E = np.float32(math.log2(math.e))
# Adding and subtracting 1.5 * 2^23 rounds a float32 to the nearest integer.
_ROUND = np.float32(12582912.0)
_LOWEST = np.float32(-126.0)
# 2^f on [-0.5, 0.5]: Chebyshev interpolation in float64, degree 6, relative error below 1e-7.
_NODES = np.cos(np.pi * (np.arange(7) + 0.5) / 7) / 2
_C6, _C5, _C4, _C3, _C2, _C1, _C0 = (np.float32(c) for c in np.polyfit(_NODES, np.exp2(_NODES), 6))


# Lanes from which sixteen products at once are faster than as many single ones.
_FEW = 4
# Rows of K or V that are asked for before they are read: they lie a page apart.
_AHEAD = 4


@numba.njit(fastmath={"contract", "nsz"}, nogil=True)
def _exponentials(x, bits):
    """Turn every x <= 0 into exp(x) in place; bits is scratch of its size."""
    for i in range(x.size):
        y = max(x[i] * _LOG2E, _LOWEST)
        whole = (y + _ROUND) - _ROUND
        f = y - whole
        p = _C6
        p = p * f + _C5
        p = p * f + _C4
        p = p * f + _C3
        p = p * f + _C2
        p = p * f + _C1
        p = p * f + _C0
        x[i] = p
        bits[i] = (np.int32(whole) + np.int32(127)) << np.int32(23)
    powers = bits.view(np.float32)
    for i in range(x.size):
        x[i] *= powers[i]


@numba.njit(fastmath={"contract", "nsz"}, nogil=True)
def _softmax(scores, bits):
    """Turn the scores [n] of one lane into exp(scores - max) in place and return their sum."""
    top = scores[0]
    for i in range(1, scores.size):
        top = max(top, scores[i])
    for i in range(scores.size):
        scores[i] -= top
    _exponentials(scores, bits)
    total = np.float32(0)
    for i in range(scores.size):
        total += scores[i]
    return total


@numba.njit(fastmath={"contract", "nsz"}, nogil=True)
def _softmax_of_lanes(scores, bits, seen, totals):
    """`_softmax` of each column of scores [n, 16]; lane l has seen[l] scores, then zeros follow."""
    n = scores.shape[0]
    tops = totals
    for lane in range(LANES):
        tops[lane] = scores[0, lane]
    for i in range(1, n):
        for lane in range(LANES):
            tops[lane] = max(tops[lane], scores[i, lane])
    for i in range(n):
        for lane in range(LANES):
            scores[i, lane] -= tops[lane]
    _exponentials(scores.reshape(n * LANES), bits)
    for lane in range(LANES):
        for i in range(seen[lane], n):
            scores[i, lane] = np.float32(0)
        totals[lane] = np.float32(0)
    for i in range(n):
        for lane in range(LANES):
            totals[lane] += scores[i, lane]


@numba.njit(nogil=True)
def _row(array, i, j):
    """The address of array[i, j], whose last axis is contiguous."""
    return array.ctypes.data + np.uintp(i * array.strides[0] + j * array.strides[1])


@numba.njit(nogil=True)
def _four_rows(array, slots, i, n, j):
    """Addresses of array[slots[i:][:4], j]; the next four of slots[:n] are prefetched."""
    if i + 8 <= n:
        for ahead in range(i + 4, i + 8):
            prefetch(_row(array, slots[ahead], j), array.shape[2])
    return (
        _row(array, slots[i], j),
        _row(array, slots[i + 1], j),
        _row(array, slots[i + 2], j),
        _row(array, slots[i + 3], j),
    )


@numba.njit(fastmath={"contract", "nsz"}, nogil=True)
def _attend_one(
    q, k, v, out, t, head, kv_head, slots, n, further, scale, soft_cap, scores, bits
):  # fmt: skip
    """One head of token t, which sees slots[:n], then the slots `further`."""
    size = q.shape[2]
    query = _row(q, t, head)
    for i in range(n):
        if i + _AHEAD < n:
            prefetch(_row(k, slots[i + _AHEAD], kv_head), size)
        scores[i] = dot(_row(k, slots[i], kv_head), query, size) * scale
    for i in range(further.size):
        scores[n + i] = dot(_row(k, further[i], kv_head), query, size) * scale
    seen = n + further.size
    if soft_cap > 0:
        for i in range(seen):
            scores[i] = soft_cap * math.tanh(scores[i] / soft_cap)
    total = np.float32(1) if seen == 0 else _softmax(scores[:seen], bits[:seen])
    own = out[t, head]
    size = own.size
    for d in range(size):
        own[d] = np.float32(0)
    to = own.ctypes.data
    whole = n - n % 4
    for i in range(0, whole, 4):
        weights = (scores[i], scores[i + 1], scores[i + 2], scores[i + 3])
        rows = _four_rows(v, slots, i, n, kv_head)
        add_rows(to, size, weights, rows)
    for i in range(whole, n):
        add_rows(to, size, (scores[i],), (_row(v, slots[i], kv_head),))
    for i in range(further.size):
        add_rows(to, size, (scores[n + i],), (_row(v, further[i], kv_head),))
    for d in range(size):
        own[d] /= total


@numba.njit(fastmath={"contract", "nsz"}, nogil=True)
def _attend_lanes(
    q, k, v, out, first, lanes, head, heads, kv_head, slots, n, further, further_counts,
    scale, soft_cap, scores, bits, queries, sums, seen, totals,
):  # fmt: skip
    """`_attend_one` for up to 16 lanes that see the same slots[:n] before their further ones.

    Lane l is token first + l // heads at head + l % heads. A row of K or V is read once for all;
    every sum is in the order of `_attend_one`.
    """
    size = q.shape[2]
    longest = n
    for lane in range(LANES):
        # Lanes to spare repeat the last one.
        used = min(lane, lanes - 1)
        token, h = used // heads, head + used % heads
        for d in range(size):
            queries[d, lane] = q[first + token, h, d]
        seen[lane] = n + further_counts[token]
        longest = max(longest, seen[lane])
    columns = queries.ctypes.data
    whole = n - n % 4
    for i in range(0, whole, 4):
        rows = _four_rows(k, slots, i, n, kv_head)
        dots(rows, columns, size, scores[i].ctypes.data)
    for i in range(whole, n):
        dots((_row(k, slots[i], kv_head),), columns, size, scores[i].ctypes.data)
    for i in range(n):
        for lane in range(LANES):
            scores[i, lane] *= scale
    for i in range(n, longest):
        for lane in range(LANES):
            scores[i, lane] = scores[0, lane]
    for lane in range(lanes):
        token, h = lane // heads, head + lane % heads
        query = _row(q, first + token, h)
        for i in range(further_counts[token]):
            scores[n + i, lane] = dot(_row(k, further[token, i], kv_head), query, size) * scale
    if soft_cap > 0:
        for i in range(longest):
            for lane in range(lanes):
                scores[i, lane] = soft_cap * math.tanh(scores[i, lane] / soft_cap)
    _softmax_of_lanes(scores[:longest], bits[: longest * LANES], seen, totals)
    size = out.shape[2]
    for lane in range(lanes):
        for d in range(size):
            sums[lane, d] = np.float32(0)
    for i in range(0, whole, 4):
        rows = _four_rows(v, slots, i, n, kv_head)
        for lane in range(lanes):
            weights = (
                scores[i, lane], scores[i + 1, lane], scores[i + 2, lane], scores[i + 3, lane]
            )  # fmt: skip
            add_rows(sums[lane].ctypes.data, size, weights, rows)
    for i in range(whole, n):
        row = _row(v, slots[i], kv_head)
        for lane in range(lanes):
            add_rows(sums[lane].ctypes.data, size, (scores[i, lane],), (row,))
    for lane in range(lanes):
        token, h = lane // heads, head + lane % heads
        for i in range(further_counts[token]):
            row = _row(v, further[token, i], kv_head)
            add_rows(sums[lane].ctypes.data, size, (scores[n + i, lane],), (row,))
        for d in range(size):
            out[first + token, h, d] = sums[lane, d] / totals[lane]


@numba.njit(parallel=True, nogil=True, cache=True)
def _attend(
    q, k, v, out, table, rows, starts, counts, extra, extra_starts, extra_counts,
    scale, soft_cap, threads,
):  # fmt: skip
    tokens, heads, size = q.shape
    group = heads // k.shape[1]
    # Heads of a group that share the lanes of a vector.
    together = group
    while together > LANES or group % together:
        together -= 1
    # Blocks of tokens that see the same slots of a row but for a few: the nodes of a tree, tokens
    # that follow each other in a prompt, and all tokens of a request in cross-attention.
    begins = np.empty(tokens + 1, np.int64)
    blocks = 0
    longest = 0
    most = 0
    for t in range(tokens):
        b = begins[blocks - 1] if t > 0 else 0
        same = (
            t > 0
            and (t - b + 1) * together <= LANES
            and rows[t] == rows[b]
            and starts[t] == starts[b]
            and counts[b] <= counts[t] <= counts[b] + LANES
        )
        if not same:
            begins[blocks] = t
            blocks += 1
            b = t
        longest = max(longest, counts[t] + extra_counts[t])
        most = max(most, counts[t] - counts[b] + extra_counts[t])
    begins[blocks] = tokens
    tasks = blocks * (heads // together)
    # Strided and not in blocks of tasks: in a prefill the last tokens see the most. Head by head:
    # tokens of one request read the same K/V.
    for thread in numba.prange(threads):
        slots = np.empty(longest, np.int64)
        further = np.empty((LANES, most), np.int64)
        further_counts = np.empty(LANES, np.int64)
        scores = np.empty((longest + 1, LANES), np.float32)
        bits = np.empty((longest + 1) * LANES, np.int32)
        queries = np.empty((size, LANES), np.float32)
        sums = np.empty((LANES, out.shape[2]), np.float32)
        seen = np.empty(LANES, np.int64)
        totals = np.empty(LANES, np.float32)
        for task in range(thread, tasks, threads):
            turn = task // blocks
            # Rotated, so that no thread gets one block's heads only.
            block = (task + turn) % blocks
            first, last = begins[block], begins[block + 1]
            head = turn * together
            n = counts[first]
            for i in range(n):
                slots[i] = table[rows[first], starts[first] + i]
            for t in range(first, last):
                own = further[t - first]
                behind = counts[t] - n
                for i in range(behind):
                    own[i] = table[rows[t], starts[t] + n + i]
                for i in range(extra_counts[t]):
                    own[behind + i] = extra[extra_starts[t] + i]
                further_counts[t - first] = behind + extra_counts[t]
            lanes = (last - first) * together
            if lanes >= _FEW and n > 0:
                _attend_lanes(
                    q, k, v, out, first, lanes, head, together, head // group, slots, n,
                    further, further_counts, scale, soft_cap,
                    scores, bits, queries, sums, seen, totals,
                )  # fmt: skip
                continue
            flat = scores.reshape(scores.size)
            for t in range(first, last):
                own = further[t - first, : further_counts[t - first]]
                for h in range(head, head + together):
                    _attend_one(
                        q, k, v, out, t, h, h // group, slots, n, own, scale, soft_cap, flat, bits
                    )  # fmt: skip


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    table: np.ndarray,
    rows: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    extra: np.ndarray,
    extra_starts: np.ndarray,
    extra_counts: np.ndarray,
    scale: np.float32,
    soft_cap: np.float32,
    threads: int,
) -> None:
    """Attention of every query token over the slots that it sees.

    Args:
        q: [T, H, D] float32; T query tokens.
        k, v: [S, KH, D] and [S, KH, DV] float32; S cache slots. H is a multiple of KH.
        out: [T, H, DV] float32, written; zeros for a token that sees nothing.
        table: [R, W] int32 slots, a row per request (SGLang's req_to_token).
        rows, starts, counts: [T] int64; token t sees table[rows[t], starts[t]:][:counts[t]] ...
        extra, extra_starts, extra_counts: ... and extra[extra_starts[t]:][:extra_counts[t]].
        scale: factor of the scores; soft_cap: tanh bound of the scores, 0 for none.
        threads: how many threads share the work; 1 for work that does not pay waking others. The
            result does not depend on it.
    """
    _attend(q, k, v, out, table, rows, starts, counts, extra, extra_starts, extra_counts,
            scale, soft_cap, threads)  # fmt: skip
