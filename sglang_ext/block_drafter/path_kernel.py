"""The search for paths as one compiled loop for CPUs, with the path head and its output in 8 bits.

What a place takes is little: one call for all places instead of some twenty operators for each.
One function calls the others, and it alone is kept in numba's cache (as in attention_kernel.py).
"""

import numba
import numpy as np

from sglang_ext.cpu.group_rows import row_functions
from sglang_ext.cpu.vectors import exponentials, total

_BITS = 8
_empty_rows, _, _quantize_rows, _multiply = row_functions((_BITS,))


@numba.njit(nogil=True)
def _go_on(rows, logprobs, beam, choices, hopeless, closed, found):
    """The paths that are followed one place on: adds nodes, keeps each request's likeliest paths.

    Args:
        rows, logprobs: int64[p, m] and float32[p, m], what may stand behind each path.
        beam: of each path, those of a request beside one another, the request, its last node,
            int64[p], its log-probability, float32[p], and rows of its last tokens, int64[p, e].
        choices: int64[n], how many tokens are tried behind each path, and paths followed.
        hopeless: log-probability below which a node is none.
        closed: bool[rows], behind which nothing stands.
        found: nodes by request, int64[n, most] rows and parents, float32[n, most] log-probabilities
            and sums of them; int64[n], how many there are.

    Returns:
        the next beam.
    """
    requests, nodes, scores, earlier = beam
    found_rows, found_parents, found_logprobs, found_scores, counts = found
    most = choices[requests].sum() if len(requests) else 0
    to_requests, to_nodes = np.empty(most, np.int64), np.empty(most, np.int64)
    to_scores = np.empty(most, np.float32)
    to_earlier = np.empty((most, earlier.shape[1]), np.int64)
    start, end = 0, 0  # of the present request's paths
    for path in range(len(requests)):
        request = requests[path]
        if path and requests[path - 1] != request:
            start = end
        for choice in range(min(choices[request], rows.shape[1])):
            row, score = rows[path, choice], scores[path] + logprobs[path, choice]
            if not score >= hopeless:
                break
            node = counts[request]
            counts[request] += 1
            found_rows[request, node], found_parents[request, node] = row, nodes[path]
            found_logprobs[request, node] = logprobs[path, choice]
            found_scores[request, node] = score
            at = end
            while at > start and to_scores[at - 1] < score:
                at -= 1
            if closed[row] or at - start >= choices[request]:
                continue
            end = min(end + 1, start + choices[request])
            for i in range(end - 1, at, -1):
                to_requests[i], to_nodes[i] = to_requests[i - 1], to_nodes[i - 1]
                to_scores[i], to_earlier[i] = to_scores[i - 1], to_earlier[i - 1]
            to_requests[at], to_nodes[at], to_scores[at] = request, node, score
            to_earlier[at, :-1], to_earlier[at, -1] = earlier[path, 1:], row
    return to_requests[:end], to_nodes[:end], to_scores[:end], to_earlier[:end]


@numba.njit(nogil=True)
def _likeliest(logits, classes, rows, logprobs):
    """The likeliest of logits float32[classes + 15 or more], which are overwritten.

    Args:
        rows, logprobs: int64[m], float32[m], written to: classes, and their log-probabilities.
    """
    most = min(len(rows), classes)
    logprobs[:] = -np.inf
    least = np.float32(-np.inf)
    for i in range(classes):
        value = logits[i]
        if value > least:
            at = most - 1
            while at and logprobs[at - 1] < value:
                logprobs[at], rows[at] = logprobs[at - 1], rows[at - 1]
                at -= 1
            logprobs[at], rows[at] = value, i
            least = logprobs[most - 1]
    top = logprobs[0]
    exponentials(logits.ctypes.data, classes, top)
    rest = top + np.log(total(logits.ctypes.data, classes))
    for i in range(most):
        logprobs[i] -= rest


@numba.njit(nogil=True)
def _chosen(places, known, place, beam, of_earlier, out):
    """float32[p, width], the path head's result for each path at one place; args as `search`'s."""
    levels, scales, factor, bias = out
    requests, _, _, earlier = beam
    inner = np.empty((len(requests), known.shape[2]), np.float32)
    for path in range(len(requests)):
        own = known[requests[path], place]
        first, second = of_earlier[0, earlier[path, 0]], of_earlier[1, earlier[path, 1]]
        for i in range(len(own)):
            inner[path, i] = max(own[i] + first[i] + second[i], np.float32(0))
    found = np.empty((len(requests), 16 * len(levels)), np.float32)
    rows = _empty_rows(len(requests), levels.shape[1])
    _quantize_rows(inner, _BITS, factor, rows, 0, len(requests))
    _multiply(_BITS, rows, (levels, scales), found, 0, len(levels))
    chosen = np.empty((len(requests), places.shape[2]), np.float32)
    for path in range(len(requests)):
        chosen[path] = places[requests[path], place] + found[path, : places.shape[2]] + bias
    return chosen


@numba.njit(parallel=True, nogil=True, cache=True)
def search(
    places, known, earlier, choices, depth, hopeless, closed, of_earlier, out, output, offset,
    found, threads,
):  # fmt: skip
    """All places, of all requests; adds to `found` (see `_go_on`).

    Args:
        places, known: float32[n, block, width] of the decoder, and [n, block, 2 width], what the
            path head makes of these.
        earlier: int64[n, 2], rows of the last committed tokens.
        depth: most places.
        of_earlier: float32[2, rows, 2 width], what each row contributes as each earlier token.
        out, output: weights of the path head's last layer and of the output layer, each (levels,
            scales, factor) as group_weights.py has them and a bias, float32[outputs].
        offset: row of the output layer's first class.
        threads: how many share the output layer.
    """
    levels, scales, factor, bias = output
    n, blocks, classes, most = len(places), len(levels), len(bias), choices.max()
    beam = np.arange(n), np.full(n, -1), np.zeros(n, np.float32), earlier
    for place in range(depth):
        count = len(beam[0])
        if not count:
            break
        rows = _empty_rows(count, levels.shape[1])
        chosen = _chosen(places, known, place, beam, of_earlier, out)
        _quantize_rows(chosen, _BITS, factor, rows, 0, count)
        logits = np.empty((count, 16 * blocks), np.float32)
        for thread in numba.prange(threads):
            first, last = blocks * thread // threads, blocks * (thread + 1) // threads
            _multiply(_BITS, rows, (levels, scales), logits, first, last)
        likeliest = np.empty((count, most), np.int64)
        logprobs = np.empty((count, most), np.float32)
        for path in range(count):
            logits[path, :classes] += bias
            _likeliest(logits[path], classes, likeliest[path], logprobs[path])
        beam = _go_on(likeliest + offset, logprobs, beam, choices, hopeless, closed, found)


@numba.njit(nogil=True, cache=True)
def go_on(rows, logprobs, beam, choices, hopeless, closed, found):
    """`_go_on`, for a search by other means."""
    return _go_on(rows, logprobs, beam, choices, hopeless, closed, found)
