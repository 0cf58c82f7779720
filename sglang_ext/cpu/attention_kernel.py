"""Paged attention for CPUs: one compiled loop for decode, extend, verify and cross-attention.

Every query token names the cache slots it sees: `count` entries of its request's row in the slot
table, then a short list of extra slots (its ancestors in a draft tree, itself included). The loop
reads K and V through these slots; nothing is gathered or padded. A token's output is a function of
its query and of the visible K/V in order, and of nothing else in the batch: the same token gets the
same bits from decode, extend and verify. Sums are in fp32, of K and V in fp32 or bf16.

One function calls the others, and it alone is kept in numba's cache: helpers that come from the
cache, or that another function was compiled with before, make the loop half as fast.

numba and not torch: at batch 1 a gather per layer costs more than the attention itself, and SDPA's
order of sums changes with the shape it is given.
"""

import math

import numba
import numpy as np

from sglang_ext.cpu.lane_vectors import HAS_WIDE_REGISTERS
from sglang_ext.cpu.vectors import (
    ROWS_AHEAD,
    add_slots,
    dots,
    exponentials,
    largest,
    prefetch,
    total,
)

# A token and a head are a lane; lanes that see the same slots are computed together.
LANES = 16
# Tasks for each thread up to which the last ones are shared.
_FEW_TASKS = 4
# Lanes whose products with four rows registers hold.
_AT_ONCE = 4 if HAS_WIDE_REGISTERS else 1


@numba.njit(nogil=True)
def _softmax(scores, count):
    """Turn `count` scores at an address into exp(scores - max) in place and return their sum."""
    exponentials(scores, count, largest(scores, count))
    return total(scores, count)


@numba.njit(nogil=True)
def _row(array, i, j):
    """The address of array[i, j], whose last axis is contiguous."""
    return array.ctypes.data + np.uintp(i * array.strides[0] + j * array.strides[1])


@numba.njit(nogil=True)
def _four_rows(array, slots, i, n, j):
    """Addresses of array[slots[i:][:4], j]; of slots[:n], four further ones are prefetched."""
    if i + ROWS_AHEAD + 4 <= n:
        for ahead in range(i + ROWS_AHEAD, i + ROWS_AHEAD + 4):
            prefetch(array, _row(array, slots[ahead], j), array.shape[2])
    return (
        _row(array, slots[i], j),
        _row(array, slots[i + 1], j),
        _row(array, slots[i + 2], j),
        _row(array, slots[i + 3], j),
    )


@numba.njit(nogil=True)
def _last_rows(array, slots, i, n, j):
    """As `_four_rows`, where fewer than four may be left: the last one is there again."""
    return (
        _row(array, slots[i], j),
        _row(array, slots[min(i + 1, n - 1)], j),
        _row(array, slots[min(i + 2, n - 1)], j),
        _row(array, slots[min(i + 3, n - 1)], j),
    )


if _AT_ONCE == 4:

    @numba.njit(nogil=True)
    def _together(addresses, lane):
        return (addresses[lane], addresses[lane + 1], addresses[lane + 2], addresses[lane + 3])

    @numba.njit(nogil=True)
    def _together_until(addresses, lane, end, spare):
        """As `_together`, `spare` from lane `end` on."""
        return (
            addresses[lane],
            addresses[lane + 1] if lane + 1 < end else spare,
            addresses[lane + 2] if lane + 2 < end else spare,
            addresses[lane + 3] if lane + 3 < end else spare,
        )

else:

    @numba.njit(nogil=True)
    def _together(addresses, lane):
        return (addresses[lane],)

    @numba.njit(nogil=True)
    def _together_until(addresses, lane, end, spare):
        return (addresses[lane],)


@numba.njit(nogil=True)
def _score_lanes(
    k, size, begin, lanes, heads, kv_head, slots, n, further, further_counts, scale, scores,
    queries,
):  # fmt: skip
    """Scores of the lanes, see `_attend_lanes`: of slots[:n], then of their further ones."""
    stride = np.uintp(scores.strides[0])
    whole = n - n % 4
    for i in range(0, whole, 4):
        rows = _four_rows(k, slots, i, n, kv_head)
        for lane in range(0, lanes, _AT_ONCE):
            dots(k, rows, _together(queries, lane), size, _row(scores, lane, i), stride, scale)
    # What rows that are there again give is behind a lane's scores, or written over.
    if whole < n:
        rows = _last_rows(k, slots, whole, n, kv_head)
        for lane in range(0, lanes, _AT_ONCE):
            dots(k, rows, _together(queries, lane), size, _row(scores, lane, whole), stride, scale)
    for token in range(begin // heads, (begin + lanes - 1) // heads + 1):
        more, count = further[token], further_counts[token]
        start, end = max(0, token * heads - begin), min(lanes, (token + 1) * heads - begin)
        for i in range(0, count, 4):
            rows = _last_rows(k, more, i, count, kv_head)
            for lane in range(start, end, _AT_ONCE):
                to = _row(scores, lane, n + i)
                dots(k, rows, _together(queries, lane), size, to, stride, scale)


@numba.njit(fastmath={"contract", "nsz"}, nogil=True)
def _attend_lanes(
    q, k, v, out, first, begin, lanes, head, heads, kv_head, slots, n, further, further_counts,
    scale, soft_cap, scores, queries, outs, totals, spare,
):  # fmt: skip
    """Up to 16 lanes that see the same slots[:n] before their further ones.

    Lane l is number begin + l of a block's: number i is token first + i // heads at head
    head + i % heads. A row of K or V is read once for all. What a lane gets does not depend on
    the others.
    """
    nowhere = np.uintp(spare.ctypes.data)
    for lane in range(len(queries)):
        # Lanes to spare repeat the last one.
        number = begin + min(lane, lanes - 1)
        token, h = first + number // heads, head + number % heads
        queries[lane] = _row(q, token, h)
        outs[lane] = _row(out, token, h) if lane < lanes else nowhere
    tokens = range(begin // heads, (begin + lanes - 1) // heads + 1)
    stride = np.uintp(scores.strides[0])
    _score_lanes(
        k, q.shape[2], begin, lanes, heads, kv_head, slots, n, further, further_counts, scale,
        scores, queries,
    )  # fmt: skip
    for lane in range(lanes):
        seen = n + further_counts[(begin + lane) // heads]
        if soft_cap > 0:
            for i in range(seen):
                scores[lane, i] = soft_cap * math.tanh(scores[lane, i] / soft_cap)
        totals[lane] = np.float32(1) if seen == 0 else _softmax(_row(scores, lane, 0), seen)
        token, h = first + (begin + lane) // heads, head + (begin + lane) % heads
        for d in range(out.shape[2]):
            out[token, h, d] = np.float32(0)
    size = out.shape[2]
    at, step = _row(v, 0, kv_head), np.uintp(v.strides[0])
    seen_by_all = np.uintp(slots.ctypes.data)
    for lane in range(0, lanes, _AT_ONCE):
        weights = _row(scores, lane, 0)
        add_slots(v, _together(outs, lane), size, weights, stride, at, step, seen_by_all, n)
    for token in tokens:
        start, end = max(0, token * heads - begin), min(lanes, (token + 1) * heads - begin)
        for lane in range(start, end, _AT_ONCE):
            to, weights = _together_until(outs, lane, end, nowhere), _row(scores, lane, n)
            behind, count = _row(further, token, 0), further_counts[token]
            add_slots(v, to, size, weights, stride, at, step, behind, count)
    for lane in range(lanes):
        token, h = first + (begin + lane) // heads, head + (begin + lane) % heads
        for d in range(size):
            out[token, h, d] /= totals[lane]


@numba.njit(nogil=True)
def _blocks(rows, starts, counts, extra_counts, together):
    """Where blocks of tokens begin, int64[blocks + 1], and the most slots of a token, all and own.

    A block's tokens see the same slots of a row but for a few: the nodes of a tree, tokens that
    follow each other in a prompt, and all tokens of a request in cross-attention.
    """
    begins = np.empty(len(rows) + 1, np.int64)
    blocks = 0
    longest = 0
    most = 0
    for t in range(len(rows)):
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
    begins[blocks] = len(rows)
    return begins[: blocks + 1], longest, most


@numba.njit(nogil=True)
def _tasks(begins, rows, turns, together, threads):
    """int64[tasks, 4]: a block, its first head, and which of their lanes: the first, and how many.

    Blocks and heads of one request after the other, whose cache lies together; of a request head
    by head: its blocks read the same K and V. Threads take them in turns and not in parts: in a
    prefill the last tokens see the most; rotated, so that no thread gets the same blocks at each
    head.
    """
    blocks = len(begins) - 1
    # Of few tasks, those that would leave threads idle are shared by lanes.
    left = blocks * turns % threads if blocks * turns < _FEW_TASKS * threads else 0
    shared = blocks * turns - left
    tasks = np.empty((blocks * turns + threads, 4), np.int64)
    count, made, start = 0, 0, 0
    while start < blocks:
        end = start + 1
        while end < blocks and rows[begins[end]] == rows[begins[start]]:
            end += 1
        for turn in range(turns):
            for i in range(end - start):
                block = start + (i + turn) % (end - start)
                lanes = (begins[block + 1] - begins[block]) * together
                part = lanes
                if made >= shared:
                    part = -(-lanes // (threads // left))
                    part = -(-part // _AT_ONCE) * _AT_ONCE
                made += 1
                for begin in range(0, lanes, part):
                    tasks[count, 0], tasks[count, 1] = block, turn * together
                    tasks[count, 2], tasks[count, 3] = begin, min(part, lanes - begin)
                    count += 1
        start = end
    return tasks[:count]


@numba.njit(nogil=True)
def _attend_tasks(
    q, k, v, out, table, rows, starts, counts, extra, extra_starts, extra_counts,
    scale, soft_cap, begins, longest, most, together, tasks, thread, threads,
):  # fmt: skip
    """Every `threads`-th of the tasks, from the thread-th on."""
    group = q.shape[1] // k.shape[1]
    slots = np.empty(longest, np.int64)
    further = np.empty((LANES, most), np.int64)
    further_counts = np.empty(LANES, np.int64)
    scores = np.empty((LANES + _AT_ONCE, longest + LANES), np.float32)
    queries = np.empty(LANES + _AT_ONCE, np.uintp)
    outs = np.empty(LANES + _AT_ONCE, np.uintp)
    totals, spare = np.empty(LANES, np.float32), np.empty(out.shape[2], np.float32)
    for task in range(thread, len(tasks), threads):
        block, head = tasks[task, 0], tasks[task, 1]
        begin, lanes = tasks[task, 2], tasks[task, 3]
        first, last = begins[block], begins[block + 1]
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
        _attend_lanes(
            q, k, v, out, first, begin, lanes, head, together, head // group,
            slots, n, further, further_counts, scale, soft_cap,
            scores, queries, outs, totals, spare,
        )  # fmt: skip


@numba.njit(parallel=True, nogil=True, cache=True)
def _attend(
    q, k, v, out, table, rows, starts, counts, extra, extra_starts, extra_counts,
    scale, soft_cap, threads,
):  # fmt: skip
    heads = q.shape[1]
    group = heads // k.shape[1]
    # Heads of a group that share the lanes of a vector.
    together = group
    while together > LANES or group % together:
        together -= 1
    begins, longest, most = _blocks(rows, starts, counts, extra_counts, together)
    tasks = _tasks(begins, rows, heads // together, together, threads)
    if threads == 1:  # a parallel loop wakes every thread
        _attend_tasks(
            q, k, v, out, table, rows, starts, counts, extra, extra_starts, extra_counts,
            scale, soft_cap, begins, longest, most, together, tasks, 0, 1,
        )  # fmt: skip
        return
    for thread in numba.prange(threads):
        _attend_tasks(
            q, k, v, out, table, rows, starts, counts, extra, extra_starts, extra_counts,
            scale, soft_cap, begins, longest, most, together, tasks, thread, threads,
        )  # fmt: skip


@numba.njit(nogil=True, cache=True)
def seen_of_trees(tree, nodes, slots):
    """What nodes of draft trees see of their trees, as `attend` takes extra slots.

    Args:
        tree: bool[trees * n, n], row = node, column = node of its tree that it sees.
        nodes: int64[T], rows of `tree` that are there; they see no others.
        slots: int64[T], where each lies.

    Returns:
        extra, extra_starts and extra_counts.
    """
    n = tree.shape[1]
    places = np.zeros(len(tree), np.int64)
    for i in range(len(nodes)):
        places[nodes[i]] = slots[i]
    extra = np.empty(len(nodes) * n, np.int64)
    starts, counts = np.empty(len(nodes), np.int64), np.empty(len(nodes), np.int64)
    end = 0
    for i in range(len(nodes)):
        first = nodes[i] // n * n
        starts[i] = end
        for other in range(n):
            if tree[nodes[i], other]:
                extra[end] = places[first + other]
                end += 1
        counts[i] = end - starts[i]
    return extra[:end], starts, counts


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
        k, v: [S, KH, D] and [S, KH, DV], float32 or uint16 with the bits of bfloat16; S cache
            slots. H is a multiple of KH.
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
