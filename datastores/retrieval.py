"""From the end of each request's tokens to a draft tree (SSSD, Algorithms 1-3).

Occurrences of the last P tokens are found in the input and in the datastore, their continuations
are folded into one tree that counts both sources apart, and the most probable nodes are taken
best first. One compiled call serves the whole batch, without the GIL.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from .config import DatastoreError, RetrievalConfig
from .heap import heap_pop, heap_push
from .input_trie import InputTrie, find_occurrences
from .pointers import array_at
from .suffix_array import find_interval

if TYPE_CHECKING:
    from .datastore import Datastore

SOURCE_INPUT = 1
SOURCE_DATASTORE = 2
_MAX_NODES = 1 << 16
_NO_SEGMENTS = np.empty((0, 4), np.int64)
_NO_TOKENS = np.empty(0, np.uint16)


@dataclass(frozen=True, slots=True)
class Draft:
    """A token tree without its root (the request's last token), best first.

    probs never rises along the arrays and parents come before children, so any leading part of
    the arrays is a tree as well, the best one of its size.
    """

    tokens: np.ndarray
    """int32[n], token ids."""
    parents: np.ndarray
    """int32[n], index of the parent in these arrays, -1 for a child of the root."""
    probs: np.ndarray
    """float32[n], estimated probability that the target's output passes through the node."""
    sources: np.ndarray
    """int8[n], where the node was seen: 1 input, 2 datastore, 3 both."""

    def __len__(self) -> int:
        return self.tokens.size


def retrieve(
    tries: Sequence[InputTrie],
    datastore: "Datastore | None",
    max_nodes: Sequence[int] | np.ndarray | int,
    config: RetrievalConfig | None = None,
    min_prob: float = 0.0,
) -> list[Draft]:
    """Draft trees for a batch of requests, each rooted at the last token its trie has seen.

    max_nodes: most nodes per draft without the root, one number or one per request (0: none).
    min_prob: nodes less probable than this are left out. A request that has seen nothing gets
    an empty draft. Searches what the datastore holds at this moment and never waits for it.
    """
    config = config or RetrievalConfig()
    batch = len(tries)
    budgets = np.empty(batch, np.int64)
    try:
        budgets[:] = max_nodes
    except ValueError:
        raise DatastoreError(
            f"max_nodes must be one number or one per request ({batch}), got {max_nodes!r}"
        ) from None
    width = int(budgets.max(initial=0))
    if width > _MAX_NODES or int(budgets.min(initial=0)) < 0:
        raise DatastoreError(f"max_nodes must be between 0 and {_MAX_NODES}, got {max_nodes!r}")
    if batch == 0:
        return []
    rows = np.empty((batch, 4), np.int64)
    for i, trie in enumerate(tries):
        rows[i] = trie._row
    # The snapshot keeps the arrays alive whose addresses are in its table.
    snapshot = datastore.snapshot() if datastore is not None else None
    tokens = np.empty((batch, width), np.int32)
    parents = np.empty((batch, width), np.int32)
    probs = np.empty((batch, width), np.float32)
    sources = np.empty((batch, width), np.int8)
    sizes = np.empty(batch, np.int64)
    _retrieve_batch(
        rows,
        _NO_SEGMENTS if snapshot is None else snapshot.table,
        _NO_TOKENS if snapshot is None else snapshot.no_tokens,
        -1 if snapshot is None else snapshot.separator,
        budgets,
        config.limits,
        config.weights,
        config.length_weights,
        config.novelty,
        float(min_prob),
        tokens,
        parents,
        probs,
        sources,
        sizes,
    )
    return [
        Draft(tokens[i, :n], parents[i, :n], probs[i, :n], sources[i, :n])
        for i, n in enumerate(sizes.tolist())
    ]


@njit(cache=True, nogil=True)
def _retrieve_batch(
    rows,
    segments,
    no_tokens,
    separator,
    budgets,
    limits,
    weights,
    length_weights,
    novelty,
    min_prob,
    tokens,
    parents,
    probs,
    sources,
    sizes,
):
    prefix, longest, max_branch, max_samples, max_input, max_scan, min_matches = limits
    no_int32 = np.empty(0, np.int32)
    # The tree: links int32[node, token | first child | last child | next sibling | drafted as |
    # depth | longest input match | longest datastore match among those that go on from here]
    # and counts float64[node, input | datastore | the same two summed over the children].
    max_branch = min(max_branch, budgets.max())  # no node of a draft is deeper than its size
    capacity = 1 + (max_samples + max_input) * max_branch
    links = np.empty((capacity, 8), np.int32)
    counts = np.empty((capacity, 4), np.float64)
    heap_probs = np.empty(capacity, np.float64)
    heap_nodes = np.empty(capacity, np.int32)
    found = np.empty(max_input, np.int32)
    lengths = np.empty(max_input, np.int32)
    intervals = np.empty((segments.shape[0], 2), np.int64)
    for request in range(rows.shape[0]):
        size = rows[request, 3]
        sizes[request] = 0
        if size == 0 or budgets[request] == 0:
            continue
        branch = min(max_branch, budgets[request])
        seen = array_at(rows[request, 0], size, no_int32)
        links[0, :5] = -1
        links[0, 5:] = 0
        counts[0] = 0.0
        nodes = 1

        same_one = array_at(rows[request, 1], size, no_int32)
        same_two = array_at(rows[request, 2], size, no_int32)
        n = find_occurrences(seen, same_one, same_two, longest, max_input, max_scan, found, lengths)
        for k in range(n):
            length = np.int64(lengths[k])
            weight = length_weights[0, length]
            # The input's own tokens have no separator; -1 is none of them.
            nodes = _fold(
                seen, np.int64(found[k]), branch, -1, length, weight, 0, links, counts, nodes
            )

        if segments.shape[0] > 0 and max_samples > 0:
            # Ids that the datastore cannot hold match nothing; the separator is the first of them.
            start = max(0, size - longest)
            for position in range(start, size):
                if seen[position] >= separator:
                    start = position + 1
            nodes = _fold_datastore(
                seen[start:], prefix, segments, no_tokens, separator, branch, max_samples,
                min_matches, length_weights[1], intervals, links, counts, nodes,
            )  # fmt: skip
        sizes[request] = _draft_best_first(
            weights, length_weights, novelty, min_prob, budgets[request],
            links, counts, heap_probs, heap_nodes,
            tokens[request], parents[request], probs[request], sources[request],
        )  # fmt: skip


@njit(cache=True, nogil=True)
def _fold_datastore(
    context, prefix, segments, no_tokens, separator, branch, max_samples, min_matches,
    length_weights, intervals, links, counts, nodes,
):  # fmt: skip
    """Samples continuations of the longest matches, then of shorter ones while there are few.

    context: the request's last tokens, of which at most `prefix` are searched for; those before
    them tell how far the longest matches reach back. Of each shorter length only the occurrences
    that do not match one token more are counted: the others have been already. Samples lie at
    regular intervals over all sub-indices' matches put end to end, which splits them by match
    count, and each stands for its interval.
    """
    query = context[max(0, context.size - prefix) :]
    left = max_samples
    matches = np.int64(0)
    for length in range(query.size, 0, -1):
        start = query.size - length
        total = np.int64(0)
        for s in range(segments.shape[0]):
            corpus = array_at(segments[s, 0], segments[s, 1], no_tokens)
            suffixes = array_at(segments[s, 2], segments[s, 3], links[0])
            low, high = find_interval(corpus, suffixes, query, start, separator)
            intervals[s, 0] = low
            intervals[s, 1] = high
            total += high - low
        if total > matches:
            samples = min(left, total)
            share = total / samples
            s = 0
            skipped = np.int64(0)  # matches in the sub-indices before s
            for k in range(samples):
                rank = (2 * k + 1) * total // (2 * samples)
                while rank - skipped >= intervals[s, 1] - intervals[s, 0]:
                    skipped += intervals[s, 1] - intervals[s, 0]
                    s += 1
                corpus = array_at(segments[s, 0], segments[s, 1], no_tokens)
                suffixes = array_at(segments[s, 2], segments[s, 3], links[0])
                position = np.int64(suffixes[intervals[s, 0] + rank - skipped])
                if start > 0 and matches > 0 and position > 0:
                    before = np.int64(corpus[position - 1])
                    if before == np.int64(query[start - 1]):
                        continue
                left -= 1
                reach = length
                if start == 0:
                    reach = _match_length(context, corpus, position + length, length)
                nodes = _fold(
                    corpus, position + length, branch, separator, reach,
                    share * length_weights[reach], 1, links, counts, nodes,
                )  # fmt: skip
        matches = total
        if total >= min_matches or left == 0:
            break
    return nodes


@njit(cache=True, nogil=True)
def _match_length(context, tokens, end, length):
    """How far tokens[:end] and the context agree backwards; at least `length`, known to."""
    while (
        length < min(context.size, end)
        and tokens[end - 1 - length] == context[context.size - 1 - length]
    ):
        length += 1
    return length


@njit(cache=True, nogil=True)
def _fold(tokens, start, branch, separator, length, weight, source, links, counts, nodes):
    """Adds the continuation at tokens[start:] to the tree; returns its new size."""
    node = 0
    for position in range(start, min(start + branch, tokens.size)):
        token = np.int64(tokens[position])
        if token == separator:
            break
        counts[node, 2 + source] += weight
        links[node, 6 + source] = max(links[node, 6 + source], length)
        child = links[node, 1]
        while child >= 0 and links[child, 0] != token:
            child = links[child, 3]
        if child < 0:
            child = nodes
            nodes += 1
            links[child, 0] = token
            links[child, 1:5] = -1
            links[child, 5] = links[node, 5] + 1
            links[child, 6:] = 0
            counts[child] = 0.0
            if links[node, 1] < 0:
                links[node, 1] = child
            else:
                links[links[node, 2], 3] = child
            links[node, 2] = child
        counts[child, source] += weight
        node = child
    return nodes


@njit(cache=True, nogil=True)
def _draft_best_first(
    weights, length_weights, novelty, min_prob, budget, links, counts, heap_probs, heap_nodes,
    tokens, parents, probs, sources,
):  # fmt: skip
    """Takes nodes in the order of their path probabilities (RetrievalConfig's estimator)."""
    links[0, 4] = -1
    drafted = 0
    heap = 0
    node = 0
    path = 1.0
    while True:
        depth = links[node, 5]
        longest = links[node, 6]
        unseen = length_weights[0, longest] * novelty[0, longest + depth]
        total = counts[node, 2]
        scale = 0.0
        longest = links[node, 7]
        if longest > 0:
            evidence = counts[node, 3]
            scale = weights[0] * min(1.0, weights[1] * length_weights[1, longest] / evidence)
            total += scale * evidence
            unseen = max(unseen, scale * length_weights[1, longest] * novelty[1, longest + depth])
        total += unseen
        child = links[node, 1]
        while child >= 0:
            prob = path * (counts[child, 0] + scale * counts[child, 1]) / total
            if prob >= min_prob and prob > 0.0:
                links[child, 4] = links[node, 4]  # the parent's place until it gets its own
                heap_push(heap_probs, heap_nodes, heap, prob, child)
                heap += 1
            child = links[child, 3]
        if heap == 0:
            return drafted
        path, node = heap_probs[0], heap_nodes[0]
        heap -= 1
        heap_pop(heap_probs, heap_nodes, heap)
        tokens[drafted] = links[node, 0]
        parents[drafted] = links[node, 4]
        probs[drafted] = path
        sources[drafted] = (counts[node, 0] > 0.0) + 2 * (counts[node, 1] > 0.0)
        links[node, 4] = drafted
        drafted += 1
        if drafted == budget:
            return drafted
