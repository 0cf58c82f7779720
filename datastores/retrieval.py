"""From the end of each request's tokens to a draft tree (SSSD, Algorithms 1-3).

Occurrences of the last P tokens are found in the input and in the datastore, their continuations
are folded into one tree that counts both sources apart, and the most probable nodes are taken
best first. Compiled, without the GIL, and without allocation: a batch is shared among a few
threads, each with arrays of its own that it reuses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numba import njit

from .config import DatastoreError, RetrievalConfig
from .draft_tree import (
    INPUT,
    SOURCE_LIVE,
    SOURCE_PROMPT,
    SOURCE_SELF_OUTPUT,
    SOURCE_STATIC,
    clear_tree,
    draft_best_first,
    fold,
)
from .input_trie import InputTrie, find_occurrences
from .pointers import array_at, atomic_add, load, matrix_at, prefetch, vector_at
from .search import LENGTHS_AT_ONCE, find_intervals
from .segment import Snapshot
from .suffix_array import token_dtype, tokens_per_key
from .workers import Workspace, default_threads, own_workspace, shared_pool

__all__ = [
    "SOURCE_LIVE",
    "SOURCE_PROMPT",
    "SOURCE_SELF_OUTPUT",
    "SOURCE_STATIC",
    "Draft",
    "Drafts",
    "retrieve",
]

_MAX_NODES = 1 << 16
_NO_SEGMENTS = np.empty((0, 7), np.int64)
_DEFAULT_CONFIG = RetrievalConfig()
# Fewer requests than this are not worth waking a thread for.
_SHARED_BATCH = 8
# The calling thread looks so often for the others' last requests before it makes them itself.
_SPINS = 2000


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
    """int8[n], where the node was seen: a sum of SOURCE_PROMPT (1), SOURCE_SELF_OUTPUT (2),
    SOURCE_LIVE (4) and SOURCE_STATIC (8)."""

    def __len__(self) -> int:
        return self.tokens.size


@dataclass(frozen=True, slots=True, eq=False)
class Drafts(Sequence[Draft]):
    """A batch of drafts in rectangular arrays; row i holds sizes[i] nodes of request i."""

    tokens: np.ndarray
    """int32[batch, most nodes]."""
    parents: np.ndarray
    """int32[batch, most nodes]."""
    probs: np.ndarray
    """float32[batch, most nodes]."""
    sources: np.ndarray
    """int8[batch, most nodes]."""
    sizes: np.ndarray
    """int64[batch]."""

    def __len__(self) -> int:
        return self.sizes.size

    @overload
    def __getitem__(self, index: int) -> Draft: ...
    @overload
    def __getitem__(self, index: slice) -> "Drafts": ...
    def __getitem__(self, index: int | slice) -> "Draft | Drafts":
        if isinstance(index, slice):
            arrays = (self.tokens, self.parents, self.probs, self.sources, self.sizes)
            return Drafts(*(array[index] for array in arrays))
        n = self.sizes[index]
        return Draft(
            self.tokens[index, :n],
            self.parents[index, :n],
            self.probs[index, :n],
            self.sources[index, :n],
        )


def retrieve(
    tries: Sequence[InputTrie],
    snapshots: Snapshot | Sequence[Snapshot | None] | None,
    max_nodes: Sequence[int] | np.ndarray | int,
    config: RetrievalConfig | None = None,
    min_prob: float = 0.0,
    *,
    threads: int | None = None,
) -> Drafts:
    """Draft trees for a batch of requests, each rooted at the last token its trie has seen.

    snapshots: what each request may read of the datastore, one for all or one (or None) per
    request. max_nodes: most nodes per draft without the root, one number or one per request (0:
    none). min_prob: nodes less probable than this are left out. threads: most threads, the
    calling one included; None: one per core, at most 4. A request that has seen nothing gets an
    empty draft. Raises DatastoreError if the arguments do not fit each other.
    """
    config = config or _DEFAULT_CONFIG
    batch = len(tries)
    budgets, width = _budgets(max_nodes, batch)
    drafts = Drafts(
        np.empty((batch, width), np.int32),
        np.empty((batch, width), np.int32),
        np.empty((batch, width), np.float32),
        np.empty((batch, width), np.int8),
        np.zeros(batch, np.int64),
    )
    if width == 0:
        return drafts
    segments, shares, most_segments, separator = _segment_tables(snapshots, batch)
    zero = token_dtype(separator)(0)
    bits, per_key = tokens_per_key(separator)
    rows = np.empty((batch, 5), np.int64)
    for i, trie in enumerate(tries):
        rows[i] = trie._row
    counters = np.zeros(2 + batch, np.int64)
    # A helper may be interrupted, and end after the call: what it reads must be there.
    kept = (snapshots, [trie._searched for trie in tries])

    def work(workspace: Workspace, helps: bool, kept: object = kept) -> bool:
        return _retrieve_batch(
            helps,
            counters,
            rows,
            segments,
            shares,
            zero,
            separator,
            bits,
            per_key,
            budgets,
            config.limits,
            config.weights,
            config.length_weights,
            config.novelty,
            float(min_prob),
            drafts.tokens,
            drafts.parents,
            drafts.probs,
            drafts.sources,
            drafts.sizes,
            workspace.fit(config, most_segments),
        )

    helpers = (default_threads() if threads is None else threads) - 1
    helpers = min(helpers, batch // (_SHARED_BATCH // 2) - 1)
    if helpers <= 0:
        work(own_workspace(), False)
    else:
        shared_pool(helpers).call(work, helpers)
    return drafts


def _budgets(max_nodes: Sequence[int] | np.ndarray | int, batch: int) -> tuple[np.ndarray, int]:
    """int64[batch] and the largest of them."""
    budgets = np.empty(batch, np.int64)
    try:
        budgets[:] = max_nodes
    except (TypeError, ValueError):
        raise DatastoreError(
            f"max_nodes must be one number or one per request ({batch}), got {max_nodes!r}"
        ) from None
    values = budgets.tolist()
    width = max(values, default=0)
    if width > _MAX_NODES or min(values, default=0) < 0:
        raise DatastoreError(f"max_nodes must be between 0 and {_MAX_NODES}, got {max_nodes!r}")
    return budgets, width


def _segment_tables(
    snapshots: Snapshot | Sequence[Snapshot | None] | None, batch: int
) -> tuple[np.ndarray, np.ndarray, int, int]:
    """All sub-indices' rows, each request's share (first row, rows), the most rows, separator.

    The snapshots must be kept until the search is over: the rows hold addresses.
    """
    shares = np.zeros((batch, 2), np.int64)
    if isinstance(snapshots, Snapshot):
        rows = len(snapshots.table)
        shares[:, 1] = rows
        return snapshots.table, shares, rows, snapshots.separator
    if snapshots is not None and len(snapshots) != batch:
        raise DatastoreError(
            f"snapshots must be one for all requests or one per request ({batch}), "
            f"got {len(snapshots)}"
        )
    given = [snapshot for snapshot in snapshots or () if snapshot is not None]
    if not given:
        return _NO_SEGMENTS, shares, 0, 0
    starts: dict[Snapshot, tuple[int, int]] = {}
    end = 0
    for snapshot in given:
        if snapshot not in starts:
            starts[snapshot] = (end, len(snapshot.table))
            end += len(snapshot.table)
    separators = {snapshot.separator for snapshot in starts}
    if len(separators) > 1:
        raise DatastoreError(
            f"the snapshots of one batch must have one vocabulary size, got {sorted(separators)}"
        )
    nothing = (0, 0)
    shares[:] = [starts[s] if s is not None else nothing for s in snapshots or ()]
    tables = [snapshot.table for snapshot in starts]
    table = tables[0] if len(tables) == 1 else np.concatenate(tables)
    return table, shares, max(map(len, tables)), separators.pop()


@njit(cache=True, nogil=True)
def _retrieve_batch(
    helps, counters, rows, segments, shares, zero, separator, bits, per_key, budgets,
    limits, source_weights, length_weights, novelty, min_prob,
    tokens, parents, probs, sources, sizes, workspace,
):  # fmt: skip
    """Takes up requests until none is left; True once the drafts of all are in place.

    counters: int64[2 + batch]: requests taken up, drafts in place, and for each request how many
    drafts were made. helps: this is not the caller's thread, which in the end makes what others
    have taken up and not finished: the system may have interrupted them. The first draft counts;
    all are alike.
    """
    counters_at = np.int64(counters.ctypes.data)
    batch = np.int64(rows.shape[0])
    request = atomic_add(counters_at, 1)
    while request < batch:
        _retrieve_one(
            request, counters_at, rows, segments, shares, zero, separator, bits, per_key, budgets,
            limits, source_weights, length_weights, novelty, min_prob,
            tokens, parents, probs, sources, sizes, workspace,
        )  # fmt: skip
        request = atomic_add(counters_at, 1)
    if helps:
        return True
    _spin(counters_at + 8, batch)
    for request in range(batch):
        if atomic_add(counters_at + 8 * (2 + request), 0) == 0:
            _retrieve_one(
                request, counters_at, rows, segments, shares, zero, separator, bits, per_key,
                budgets, limits, source_weights, length_weights, novelty, min_prob,
                tokens, parents, probs, sources, sizes, workspace,
            )  # fmt: skip
    return _spin(counters_at + 8, batch)


@njit(cache=True, nogil=True)
def _spin(counter_at, batch):
    """Whether a counter gets that far in some microseconds."""
    for _ in range(_SPINS):
        if atomic_add(counter_at, 0) >= batch:
            return True
    return False


@njit(cache=True, nogil=True)
def _retrieve_one(
    request, counters_at, rows, all_segments, shares, zero, separator, bits, per_key, budgets,
    limits, source_weights, length_weights, novelty, min_prob,
    tokens, parents, probs, sources, sizes, workspace,
):  # fmt: skip
    """Makes one request's draft; puts it in place unless another thread has done so."""
    prefix, longest, max_branch = limits[0], limits[1], limits[2]
    max_samples, max_input, max_scan, min_matches = limits[3], limits[4], limits[5], limits[6]
    tree = (workspace[0], workspace[1], workspace[2], workspace[3], workspace[-1])
    draft = (workspace[6], workspace[7], workspace[8], workspace[9])
    found_at = workspace[10]
    seen_at, size, prompt_size = rows[request, 0], rows[request, 3], rows[request, 4]
    budget = budgets[request]
    drafted = np.int64(0)
    if size > 0 and budget > 0:
        branch = min(max_branch, budget)  # no node of a draft is deeper than its size
        num_segments = shares[request, 1]
        segments_at = np.int64(all_segments.ctypes.data) + 56 * shares[request, 0]
        texts = (seen_at, prompt_size, segments_at, separator)
        clear_tree(tree)
        found = vector_at(found_at, np.int32)
        lengths = vector_at(found_at + 4 * max_input, np.int32)
        n = find_occurrences(
            array_at(seen_at, size, np.int32),
            vector_at(rows[request, 1], np.int32),
            vector_at(rows[request, 2], np.int32),
            longest, max_input, max_scan, found, lengths,
            matrix_at(found_at + 8 * max_input, max_input + 1, np.int32),
        )  # fmt: skip
        nodes = np.int64(1)
        for k in range(n):
            length, start = np.int64(lengths[k]), np.int64(found[k])
            nodes = fold(
                tree, nodes, texts, zero, INPUT, seen_at, np.int32(0), start,
                min(start + branch, size), length, length_weights[0, length], k, SOURCE_PROMPT,
            )  # fmt: skip
        if num_segments > 0 and max_samples > 0:
            nodes = _fold_datastore(
                tree, nodes, texts, zero, size, num_segments, n, prefix, longest, bits, per_key,
                branch, max_samples, min_matches, length_weights,
                workspace[11], workspace[12], workspace[13],
            )  # fmt: skip
        drafted = draft_best_first(
            tree, nodes, texts, zero, source_weights, length_weights, novelty, min_prob,
            budget, workspace[4], workspace[5], draft,
        )  # fmt: skip
    if atomic_add(counters_at + 8 * (2 + request), 1) == 0:
        for i in range(drafted):
            tokens[request, i] = load(draft[0], i, np.int32(0))
            parents[request, i] = load(draft[1], i, np.int32(0))
            probs[request, i] = load(draft[2], i, np.float32(0))
            sources[request, i] = load(draft[3], i, np.int8(0))
        sizes[request] = drafted
        atomic_add(counters_at + 8, 1)


@njit(cache=True, nogil=True)
def _fold_datastore(
    tree, nodes, texts, zero, size, num_segments, number, prefix, longest, bits, per_key,
    branch, max_samples, min_matches, length_weights, intervals_at, searches_at, sampled_at,
):  # fmt: skip
    """Samples continuations of the longest matches, then of shorter ones while there are few.

    At most `prefix` of the last tokens are searched for; those before them tell how far the
    longest matches reach back. Of each shorter length only the occurrences that do not match one
    token more are counted: the others have been already. Samples lie at regular intervals over
    all sub-indices' matches put end to end, which splits them by match count, and each stands for
    its interval.
    """
    seen_at, _, segments_at, separator = texts
    segments = matrix_at(segments_at, 7, np.int64)
    seen = vector_at(seen_at, np.int32)
    # Ids that the datastore cannot hold match nothing; the separator is the first of them.
    context = max(0, size - longest)
    for position in range(context, size):
        if seen[position] >= separator:
            context = position + 1
    query = max(context, size - prefix)
    query_size = size - query
    sampled = vector_at(sampled_at, np.int64)
    left = max_samples
    matches = np.int64(0)
    searched = np.int64(0)
    for start in range(query_size):
        if start == searched:
            searched = min(start + LENGTHS_AT_ONCE, query_size)
            find_intervals(
                segments_at, num_segments, seen_at + 4 * query, query_size, start, searched,
                separator, bits, per_key, zero, intervals_at, searches_at,
            )  # fmt: skip
        length = query_size - start
        intervals = matrix_at(intervals_at + 16 * start * num_segments, 2, np.int64)
        total = np.int64(0)
        for s in range(num_segments):
            total += max(0, intervals[s, 1] - intervals[s, 0])
        if total > matches:
            samples = min(left, total)
            share = total / samples
            _sample(segments, zero, intervals, length, total, samples, branch, sampled)
            for k in range(samples):
                s, position = sampled[2 * k], sampled[2 * k + 1]
                if position < 0:
                    continue
                tokens_at = segments[s, 0]
                if start > 0 and matches > 0 and position > 0:
                    before = np.int64(load(tokens_at, position - 1, zero))
                    if before == seen[query + start - 1]:
                        continue
                left -= 1
                end = position + length
                reach = length
                if start == 0:
                    reach = _match_length(seen, context, size, tokens_at, end, length, zero)
                nodes = fold(
                    tree, nodes, texts, zero, s, tokens_at, zero, end,
                    min(end + branch, segments[s, 1]), reach, share * length_weights[1, reach],
                    number, SOURCE_LIVE if segments[s, 6] != 0 else SOURCE_STATIC,
                )  # fmt: skip
                number += 1
        matches = total
        if total >= min_matches or left == 0:
            break
    return nodes


@njit(cache=True, nogil=True)
def _sample(segments, zero, intervals, length, total, samples, branch, sampled):
    """Sub-index and position of each sample; what will be read there is asked for already."""
    s = 0
    skipped = np.int64(0)  # matches in the sub-indices before s
    for k in range(samples):
        rank = (2 * k + 1) * total // (2 * samples)
        while rank - skipped >= max(0, intervals[s, 1] - intervals[s, 0]):
            skipped += max(0, intervals[s, 1] - intervals[s, 0])
            s += 1
        at = intervals[s, 0] + rank - skipped
        sampled[2 * k] = s
        sampled[2 * k + 1] = at
        prefetch(segments[s, 2], at, np.int32(0))
    for k in range(samples):
        s = sampled[2 * k]
        position = np.int64(load(segments[s, 2], sampled[2 * k + 1], np.int32(0)))
        # Only a damaged file has positions where there are no tokens.
        if position < 0 or position + length > segments[s, 1]:
            position = np.int64(-1)
        else:
            prefetch(segments[s, 0], position - 1, zero)
            prefetch(segments[s, 0], position + length + branch - 1, zero)
        sampled[2 * k + 1] = position


@njit(cache=True, nogil=True)
def _match_length(seen, context, size, tokens_at, end, length, zero):
    """How far tokens[:end] and seen[context:size] agree backwards; `length` is known to."""
    limit = min(size - context, end)
    while length < limit and load(tokens_at, end - 1 - length, zero) == seen[size - 1 - length]:
        length += 1
    return length
