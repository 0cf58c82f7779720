"""Paged attention for CPUs: one compiled loop for decode, extend, verify and cross-attention.

Every query token names the cache slots it sees: `count` entries of its request's row in the slot
table, then a short list of extra slots (its ancestors in a draft tree, itself included). The loop
reads K and V through these slots; nothing is gathered or padded. A token's output is a function of
its query and of the visible K/V in order, and of nothing else in the batch: the same token gets the
same bits from decode, extend and verify. Sums are in fp32.

numba and not torch: at batch 1 a gather per layer costs more than the attention itself, and SDPA's
order of sums changes with the shape it is given.
"""

import math

import numba
import numpy as np

_LOG2E = np.float32(math.log2(math.e))
# Adding and subtracting 1.5 * 2^23 rounds a float32 to the nearest integer.
_ROUND = np.float32(12582912.0)
_LOWEST = np.float32(-126.0)
# Tokens that share a pass over K and V; their scores stay in the second-level cache.
_BLOCK = 16
# 2^f on [-0.5, 0.5]: Chebyshev interpolation in float64, degree 6, relative error below 1e-7.
_NODES = np.cos(np.pi * (np.arange(7) + 0.5) / 7) / 2
_C6, _C5, _C4, _C3, _C2, _C1, _C0 = (np.float32(c) for c in np.polyfit(_NODES, np.exp2(_NODES), 6))


@numba.njit(fastmath={"reassoc", "contract"}, nogil=True, cache=True)
def _dot(a, b):
    total = np.float32(0)
    for d in range(a.size):
        total += a[d] * b[d]
    return total


@numba.njit(fastmath={"contract", "nsz"}, nogil=True, cache=True)
def _softmax(scores, bits, n):
    """Turn scores[:n] into exp(scores - max) in place and return their sum; bits is scratch."""
    top = scores[0]
    for i in range(1, n):
        top = max(top, scores[i])
    for i in range(n):
        y = max((scores[i] - top) * _LOG2E, _LOWEST)
        whole = (y + _ROUND) - _ROUND
        f = y - whole
        p = _C6
        p = p * f + _C5
        p = p * f + _C4
        p = p * f + _C3
        p = p * f + _C2
        p = p * f + _C1
        p = p * f + _C0
        scores[i] = p
        bits[i] = (np.int32(whole) + np.int32(127)) << np.int32(23)
    powers = bits.view(np.float32)
    for i in range(n):
        scores[i] *= powers[i]
    total = np.float32(0)
    for i in range(n):
        total += scores[i]
    return total


@numba.njit(fastmath={"contract", "nsz"}, nogil=True, cache=True)
def _attend_block(
    q, k, v, out, head, kv_head, first, last, slots, n, extra, extra_starts, extra_counts,
    scale, soft_cap, scores, bits, tail,
):  # fmt: skip
    """One head of the tokens first..last-1, which all see slots[:n] before their own extra slots.

    A row of K or V is read once for all of them; each token's sums are in the order of its slots,
    whatever the block.
    """
    for i in range(n):
        row = k[slots[i], kv_head]
        for t in range(first, last):
            scores[t - first, i] = _dot(q[t, head], row) * scale
    for t in range(first, last):
        for i in range(extra_counts[t]):
            row = k[extra[extra_starts[t] + i], kv_head]
            scores[t - first, n + i] = _dot(q[t, head], row) * scale
    whole = n - n % 4
    for t in range(first, last):
        seen = n + extra_counts[t]
        own = scores[t - first]
        if soft_cap > 0:
            for i in range(seen):
                own[i] = soft_cap * math.tanh(own[i] / soft_cap)
        own[seen] = np.float32(1) if seen == 0 else _softmax(own, bits, seen)
        for d in range(out.shape[2]):
            out[t, head, d] = np.float32(0)
    # Four rows of V per pass over the output.
    for i in range(0, whole, 4):
        v0, v1 = v[slots[i], kv_head], v[slots[i + 1], kv_head]
        v2, v3 = v[slots[i + 2], kv_head], v[slots[i + 3], kv_head]
        for t in range(first, last):
            _add_four(out[t, head], scores[t - first], i, v0, v1, v2, v3)
    for t in range(first, last):
        own, to = scores[t - first], out[t, head]
        for i in range(whole, n):
            tail[i - whole] = slots[i]
        for i in range(extra_counts[t]):
            tail[n - whole + i] = extra[extra_starts[t] + i]
        rest = n - whole + extra_counts[t]
        fours = rest - rest % 4
        for i in range(0, fours, 4):
            v0, v1 = v[tail[i], kv_head], v[tail[i + 1], kv_head]
            v2, v3 = v[tail[i + 2], kv_head], v[tail[i + 3], kv_head]
            _add_four(to, own, whole + i, v0, v1, v2, v3)
        for i in range(fours, rest):
            p0 = own[whole + i]
            v0 = v[tail[i], kv_head]
            for d in range(to.size):
                to[d] += p0 * v0[d]
        total = own[whole + rest]
        for d in range(to.size):
            to[d] /= total


@numba.njit(fastmath={"contract", "nsz"}, nogil=True, cache=True)
def _add_four(out, weights, i, v0, v1, v2, v3):
    p0, p1, p2, p3 = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
    for d in range(out.size):
        out[d] = (((out[d] + p0 * v0[d]) + p1 * v1[d]) + p2 * v2[d]) + p3 * v3[d]


def _attend(
    q, k, v, out, table, rows, starts, counts, extra, extra_starts, extra_counts,
    scale, soft_cap, threads,
):  # fmt: skip
    tokens, heads, _ = q.shape
    group = heads // k.shape[1]
    # Blocks of tokens that see the same slots of the same row: the nodes of a tree, and all
    # tokens of a request in cross-attention.
    begins = np.empty(tokens + 1, np.int64)
    blocks = 0
    longest = 0
    most = 0
    for t in range(tokens):
        same = (
            t > 0
            and t - begins[blocks - 1] < _BLOCK
            and rows[t] == rows[t - 1]
            and starts[t] == starts[t - 1]
            and counts[t] == counts[t - 1]
        )
        if not same:
            begins[blocks] = t
            blocks += 1
        longest = max(longest, counts[t] + extra_counts[t])
        most = max(most, extra_counts[t])
    begins[blocks] = tokens
    # Whole groups share the K/V they read; single heads keep all threads busy when tasks are few.
    per_task = group if blocks * k.shape[1] >= 4 * threads else 1
    tasks = blocks * (heads // per_task)
    # Strided and not in blocks of tasks: in a prefill the last tokens see the most. Head by head:
    # tokens of one request read the same K/V.
    for thread in numba.prange(threads):
        slots = np.empty(longest, np.int64)
        scores = np.empty((_BLOCK, longest + 1), np.float32)
        bits = np.empty(longest, np.int32)
        tail = np.empty(most + 3, np.int64)
        for task in range(thread, tasks, threads):
            turn = task // blocks
            # Rotated, so that no thread gets one block's heads only.
            block = (task + turn) % blocks
            t = begins[block]
            n = counts[t]
            for i in range(n):
                slots[i] = table[rows[t], starts[t] + i]
            for h in range(turn * per_task, (turn + 1) * per_task):
                _attend_block(
                    q, k, v, out, h, h // group, t, begins[block + 1], slots, n,
                    extra, extra_starts, extra_counts, scale, soft_cap, scores, bits, tail,
                )  # fmt: skip


_attend_parallel = numba.njit(parallel=True, nogil=True, cache=True)(_attend)
_attend_alone = numba.njit(nogil=True, cache=True)(_attend)


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
    run = _attend_parallel if threads > 1 else _attend_alone
    run(q, k, v, out, table, rows, starts, counts, extra, extra_starts, extra_counts,
        scale, soft_cap, threads)  # fmt: skip
