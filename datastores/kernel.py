"""The compiled part of retrieval: one call searches for a batch, shared among threads."""

import numpy as np
from numba import njit

from . import columns as col
from .draft_tree import (
    INPUT,
    SOURCE_LIVE,
    SOURCE_PROMPT,
    SOURCE_STATIC,
    clear_tree,
    draft_best_first,
    fold,
)
from .input_trie import find_occurrences, suppose
from .pointers import array_at, atomic_add, atomic_load, load, matrix_at, prefetch, vector_at
from .search import LENGTHS_AT_ONCE, find_intervals
from .workers import MAILBOX_WORKSPACE, end_call, post_call, wait_for_call

# A call, as threads share it: counters of requests taken up and of drafts in place, addresses of
# what is read and written, a few numbers; from CALL_SIZE on, for each request, how many drafts of
# it were made.
(_TAKEN, _PLACED, _BATCH, _WIDTH, _SEPARATOR, _BITS, _PER_KEY, _ROWS, _SEGMENTS, _SHARES, _BUDGETS,
 _MIN_PROB, _LIMITS, _WEIGHTS, _LENGTH_WEIGHTS, _NOVELTY, _TOKENS, _PARENTS, _PROBS, _SOURCES,
 _SIZES, _FOLLOWERS, _FOLLOWER_PROBS, _BIGRAM_ROWS, _FOLLOWERS_EACH, _SUPPOSED, _SUPPOSED_LENGTHS,
 _MOST_SUPPOSED, _STOP, CALL_SIZE) = range(30)  # fmt: skip
# What stops a call from another thread: whether it is stopped, and, in a cache line of its own, how
# many work on the same inputs.
STOP_SET, STOP_WORKING, STOP_WORDS = 0, 8, 16
# The calling thread looks so often for the others' last drafts before it makes them itself.
_SPINS = 2000


@njit(cache=True, nogil=True)
def run_call(
    call, rows, segments, shares, budgets, min_prob, separator, bits, per_key, zero,
    limits, weights, length_weights, novelty, followers, follower_probs,
    tokens, parents, probs, sources, sizes, workspace, mailboxes, supposed, lengths, stop_at,
):  # fmt: skip
    """Makes all drafts, with the helpers' help. True once all are in place; else call it again.

    call: int64[CALL_SIZE + batch], zeros. A request that a helper has taken up and not finished
    is done again here in the end: the system may have interrupted the helper. The first draft
    made counts, and all are alike. supposed, lengths: what requests are supposed to go on with,
    int32[batch, most] and int64[batch]; of no rows: nothing. With them there are no helpers.
    stop_at: address of int64[STOP_WORDS]; 0: it is not stopped.
    """
    batch = np.int64(rows.shape[0])
    call_at = np.int64(call.ctypes.data)
    call[_BATCH] = batch
    call[_WIDTH] = tokens.shape[1]
    call[_SEPARATOR], call[_BITS], call[_PER_KEY] = separator, bits, per_key
    call[_ROWS] = rows.ctypes.data
    call[_SEGMENTS] = segments.ctypes.data
    call[_SHARES] = shares.ctypes.data
    call[_BUDGETS] = budgets.ctypes.data
    call[_MIN_PROB] = min_prob.ctypes.data
    call[_LIMITS] = limits.ctypes.data
    call[_WEIGHTS] = weights.ctypes.data
    call[_LENGTH_WEIGHTS] = length_weights.ctypes.data
    call[_NOVELTY] = novelty.ctypes.data
    call[_FOLLOWERS] = followers.ctypes.data
    call[_FOLLOWER_PROBS] = follower_probs.ctypes.data
    call[_BIGRAM_ROWS], call[_FOLLOWERS_EACH] = followers.shape
    call[_TOKENS] = tokens.ctypes.data
    call[_PARENTS] = parents.ctypes.data
    call[_PROBS] = probs.ctypes.data
    call[_SOURCES] = sources.ctypes.data
    call[_SIZES] = sizes.ctypes.data
    if supposed.size > 0:
        call[_SUPPOSED], call[_MOST_SUPPOSED] = supposed.ctypes.data, supposed.shape[1]
        call[_SUPPOSED_LENGTHS] = lengths.ctypes.data
    if stop_at != 0:
        call[_STOP] = stop_at
        atomic_add(stop_at + 8 * STOP_WORKING, 1)
    done = _run(call, call_at, batch, mailboxes, np.int64(workspace.ctypes.data), zero)
    if stop_at != 0:
        atomic_add(stop_at + 8 * STOP_WORKING, -1)
    return done


@njit(cache=True, nogil=True)
def _run(call, call_at, batch, mailboxes, workspace_at, zero):
    if call[_TAKEN] == 0:
        for mailbox_at in mailboxes:
            post_call(mailbox_at, call_at)
    _take_requests(call_at, workspace_at, zero)
    if _is_stopped(call_at) or _all_placed(call_at):
        return True
    for request in range(batch):
        if atomic_add(call_at + 8 * (CALL_SIZE + request), 0) == 0:
            _retrieve_one(call_at, request, workspace_at, zero)
    return _all_placed(call_at)


@njit(cache=True, nogil=True)
def help_forever(mailbox_at, zero):
    """What a helper does: takes part in each call that its mailbox names."""
    mailbox = vector_at(mailbox_at, np.int64)
    while True:
        call_at = wait_for_call(mailbox_at)
        _take_requests(call_at, mailbox[MAILBOX_WORKSPACE], zero)
        end_call(mailbox_at, call_at)


@njit(cache=True, nogil=True)
def _take_requests(call_at, workspace_at, zero):
    batch = vector_at(call_at, np.int64)[_BATCH]
    request = atomic_add(call_at + 8 * _TAKEN, 1)
    while request < batch and not _is_stopped(call_at):
        _retrieve_one(call_at, request, workspace_at, zero)
        request = atomic_add(call_at + 8 * _TAKEN, 1)


@njit(cache=True, nogil=True)
def _is_stopped(call_at):
    stop_at = vector_at(call_at, np.int64)[_STOP]
    return stop_at != 0 and atomic_load(stop_at + 8 * STOP_SET) != 0


@njit(cache=True, nogil=True)
def _bigrams_after(call, token):
    """Addresses of this token's rows of the two tables, and how many columns are known."""
    each = call[_FOLLOWERS_EACH]
    if token < 0 or token >= call[_BIGRAM_ROWS]:
        return np.int64(0), np.int64(0), np.int64(0)
    row_at = call[_FOLLOWERS] + 4 * each * token
    row = vector_at(row_at, np.int32)
    known = np.int64(0)
    while known < each and row[known] >= 0:
        known += 1
    return row_at, call[_FOLLOWER_PROBS] + 4 * each * token, known


@njit(cache=True, nogil=True)
def _all_placed(call_at):
    """Whether all drafts are in place, or are within some microseconds."""
    batch = vector_at(call_at, np.int64)[_BATCH]
    for _ in range(_SPINS):  # noqa: SIM110 (compiled)
        if atomic_add(call_at + 8 * _PLACED, 0) >= batch:
            return True
    return False


@njit(cache=True, nogil=True)
def _retrieve_one(call_at, request, workspace_at, zero):
    """Makes one request's draft; puts it in place unless another thread has done so."""
    call = vector_at(call_at, np.int64)
    workspace = vector_at(workspace_at, np.int64)
    limits = vector_at(call[_LIMITS], np.int64)
    prefix, longest = limits[col.PREFIX_LENGTH], limits[col.MAX_MATCH_LENGTH]
    max_branch = limits[col.BRANCH_LENGTH]
    max_samples, max_input = limits[col.MAX_SAMPLES], limits[col.MAX_INPUT_SAMPLES]
    max_scan, min_matches = limits[col.MAX_INPUT_SCAN], limits[col.MIN_MATCHES]
    length_weights = matrix_at(call[_LENGTH_WEIGHTS], longest + 1, np.float64)
    novelty = matrix_at(call[_NOVELTY], longest + max_branch + 1, np.float64)
    tree = (
        workspace[col.NODES_AT], workspace[col.WEIGHTS_AT], workspace[col.KEYS_AT],
        workspace[col.CHILDREN_AT], workspace[col.SLOTS],
    )  # fmt: skip
    draft = (
        workspace[col.DRAFT_TOKENS_AT], workspace[col.DRAFT_PARENTS_AT],
        workspace[col.DRAFT_PROBS_AT], workspace[col.DRAFT_SOURCES_AT],
    )  # fmt: skip
    row = vector_at(call[_ROWS] + col.TRIE_BYTES * request, np.int64)
    share = vector_at(call[_SHARES] + col.SHARE_BYTES * request, np.int64)
    seen_at, size, prompt_size = row[col.SEEN_AT], row[col.SEEN_SIZE], row[col.PROMPT_SIZE]
    budget = vector_at(call[_BUDGETS], np.int64)[request]
    _suppose_own(call, row, request)
    drafted = np.int64(0)
    if size > 0 and budget > 0:
        branch = min(max_branch, budget)  # no node of a draft is deeper than its size
        segments_at = call[_SEGMENTS] + col.SEGMENT_BYTES * share[col.FIRST_SEGMENT]
        texts = (seen_at, prompt_size, segments_at, call[_SEPARATOR])
        clear_tree(tree)
        nodes, n = _fold_input(
            tree, texts, zero, row, size, longest, max_input, max_scan, branch, length_weights,
            workspace[col.OCCURRENCES_AT],
        )  # fmt: skip
        if share[col.SEGMENTS] > 0 and max_samples > 0:
            nodes = _fold_datastore(
                tree, nodes, texts, zero, size, share[col.SEGMENTS], n, prefix, longest,
                call[_BITS], call[_PER_KEY], branch, max_samples, min_matches, length_weights,
                workspace[col.INTERVALS_AT], workspace[col.SEARCHES_AT], workspace[col.SAMPLES_AT],
            )  # fmt: skip
        drafted = draft_best_first(
            tree, nodes, texts, zero, vector_at(call[_WEIGHTS], np.float64), length_weights,
            novelty, _bigrams_after(call, np.int64(load(seen_at, size - 1, np.int32(0)))),
            vector_at(call[_MIN_PROB], np.float64)[0], budget,
            workspace[col.HEAP_PROBS_AT], workspace[col.HEAP_KEYS_AT], draft,
        )  # fmt: skip
    if atomic_add(call_at + 8 * (CALL_SIZE + request), 1) == 0:
        _place(call, request, drafted, draft)
        atomic_add(call_at + 8 * _PLACED, 1)


@njit(cache=True, nogil=True)
def _suppose_own(call, row, request):
    """Writes down what a request is supposed to go on with, if anything is."""
    if call[_SUPPOSED] != 0:
        count = vector_at(call[_SUPPOSED_LENGTHS], np.int64)[request]
        suppose(row, call[_SUPPOSED] + 4 * call[_MOST_SUPPOSED] * request, count)


@njit(cache=True, nogil=True)
def _fold_input(
    tree, texts, zero, row, size, longest, max_input, max_scan, branch, length_weights,
    occurrences_at,
):  # fmt: skip
    """Folds continuations of what the request has seen; the tree's size, and how many they are."""
    seen_at = texts[0]
    found = vector_at(occurrences_at, np.int32)
    lengths = vector_at(occurrences_at + 4 * max_input, np.int32)
    n = find_occurrences(
        array_at(seen_at, size, np.int32),
        vector_at(row[col.SAME_ONE_AT], np.int32),
        vector_at(row[col.SAME_TWO_AT], np.int32),
        longest, max_input, max_scan, found, lengths,
        matrix_at(occurrences_at + 8 * max_input, max_input + 1, np.int32),
    )  # fmt: skip
    nodes = np.int64(1)
    for k in range(n):
        length, start = np.int64(lengths[k]), np.int64(found[k])
        nodes = fold(
            tree, nodes, texts, zero, INPUT, seen_at, np.int32(0), start,
            min(start + branch, size), length, length_weights[col.OF_INPUT, length], k,
            SOURCE_PROMPT,
        )  # fmt: skip
    return nodes, n


def drafts_placed(call):
    """How many drafts of a call are in place; without helpers, the first ones."""
    return int(call[_PLACED])


@njit(cache=True, nogil=True)
def _place(call, request, drafted, draft):
    """Copies a draft to where the caller looks for it."""
    start = request * call[_WIDTH]
    tokens = vector_at(call[_TOKENS] + 4 * start, np.int32)
    parents = vector_at(call[_PARENTS] + 4 * start, np.int32)
    probs = vector_at(call[_PROBS] + 4 * start, np.float32)
    sources = vector_at(call[_SOURCES] + start, np.int8)
    for i in range(drafted):
        tokens[i] = load(draft[0], i, np.int32(0))
        parents[i] = load(draft[1], i, np.int32(0))
        probs[i] = load(draft[2], i, np.float32(0))
        sources[i] = load(draft[3], i, np.int8(0))
    vector_at(call[_SIZES], np.int64)[request] = drafted


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
    segments = matrix_at(segments_at, col.SEGMENT_COLUMNS, np.int64)
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
    matches = 0
    searched = 0
    for start in range(query_size):
        if start == searched:
            searched = min(start + LENGTHS_AT_ONCE, query_size)
            find_intervals(
                segments_at, num_segments, seen_at + 4 * query, query_size, start, searched,
                separator, bits, per_key, zero, intervals_at, searches_at,
            )  # fmt: skip
        length = query_size - start
        intervals = matrix_at(
            intervals_at + col.INTERVAL_BYTES * start * num_segments, col.INTERVAL_COLUMNS, np.int64
        )
        total = 0
        for s in range(num_segments):
            total += max(0, intervals[s, col.BEHIND] - intervals[s, col.FIRST])
        if total > matches:
            samples = min(left, total)
            share = total / samples
            _sample(segments, zero, intervals, length, total, samples, branch, sampled)
            for k in range(samples):
                s, position = sampled[2 * k], sampled[2 * k + 1]
                if position < 0:
                    continue
                tokens_at = segments[s, col.TOKENS_AT]
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
                    min(end + branch, segments[s, col.NUM_TOKENS]), reach,
                    share * length_weights[col.OF_DATASTORE, reach],
                    number, SOURCE_LIVE if segments[s, col.IS_LIVE] != 0 else SOURCE_STATIC,
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
        while rank - skipped >= max(0, intervals[s, col.BEHIND] - intervals[s, col.FIRST]):
            skipped += max(0, intervals[s, col.BEHIND] - intervals[s, col.FIRST])
            s += 1
        at = intervals[s, col.FIRST] + rank - skipped
        sampled[2 * k] = s
        sampled[2 * k + 1] = at
        prefetch(segments[s, col.SUFFIXES_AT], at, np.int32(0))
    for k in range(samples):
        s = sampled[2 * k]
        position = np.int64(load(segments[s, col.SUFFIXES_AT], sampled[2 * k + 1], np.int32(0)))
        # Only a damaged file has positions where there are no tokens.
        if position < 0 or position + length > segments[s, col.NUM_TOKENS]:
            position = np.int64(-1)
        else:
            prefetch(segments[s, col.TOKENS_AT], position - 1, zero)
            prefetch(segments[s, col.TOKENS_AT], position + length + branch - 1, zero)
        sampled[2 * k + 1] = position


@njit(cache=True, nogil=True)
def _match_length(seen, context, size, tokens_at, end, length, zero):
    """How far tokens[:end] and seen[context:size] agree backwards; `length` is known to."""
    limit = min(size - context, end)
    while length < limit and load(tokens_at, end - 1 - length, zero) == seen[size - 1 - length]:
        length += 1
    return length
