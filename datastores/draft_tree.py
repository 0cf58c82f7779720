"""The tree of continuations of one request, and the draft taken from it best first.

A node is made when a continuation first reaches it; what follows there is only noted (where the
continuation goes on) until a second one arrives or the node is drafted. Most continuations part
from all others after a few tokens, so most of their tokens are never read.

Two tuples go through all functions. tree: addresses of the nodes (int32[capacity, NODE_COLUMNS]),
their weights (float64[capacity, WEIGHT_COLUMNS]) and a hash table of children (keys uint64[slots +
1], nodes int32[slots]), and its slots, a power of two. texts: address of the request's tokens,
how many of them are the prompt's, address of the sub-indices (Snapshot.table), separator. zero is
a number of the dtype of the sub-indices' tokens.
"""

import numpy as np
from numba import njit

from . import columns as col
from .heap import heap_pop, heap_push
from .origins import Origin
from .pointers import load, matrix_at, vector_at

# Columns of a node. Rest: where its only continuation goes on, sub-index (-1: input), position,
# end (0: nothing left) and match length. Rank: its first continuation's number, then its depth.
(TOKEN, FIRST_CHILD, LAST_CHILD, NEXT_SIBLING, PLACE, DEPTH, RANK, SOURCES,
 INPUT_LENGTH, DATASTORE_LENGTH, REST_SEGMENT, REST_POSITION, REST_END, REST_LENGTH,
 ) = range(14)  # fmt: skip
NODE_COLUMNS = 16  # a cache line
# Columns of a node's weights: input, datastore, and the same summed over the children.
CHILDREN = 2
WEIGHT_COLUMNS = 4
RANK_DEPTHS = 128
_LAST_RANK = (1 << 31) - 1
INPUT = -1

# Plain ints are constants in compiled code, members of a flag are not.
SOURCE_PROMPT = int(Origin.PROMPT)
SOURCE_SELF_OUTPUT = int(Origin.SELF_OUTPUT)
SOURCE_LIVE = int(Origin.LIVE)
SOURCE_STATIC = int(Origin.STATIC)
SOURCE_BIGRAM = int(Origin.BIGRAM)

_TOKEN_BITS = 31
_NODE_BITS = 20
_STAMPS = 1 << (64 - _TOKEN_BITS - _NODE_BITS)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@njit(cache=True, nogil=True)
def clear_tree(tree):
    """Makes node 0, the root, the only one."""
    nodes_at, weights_at, keys_at, _, slots = tree
    # The hash table's entries bear a stamp, the last of its keys, so that it need not be emptied.
    keys = vector_at(keys_at, np.uint64)
    keys[slots] += np.uint64(1)
    if keys[slots] == np.uint64(_STAMPS):
        for slot in range(slots):
            keys[slot] = np.uint64(0)
        keys[slots] = np.uint64(1)
    _clear_node(nodes_at, weights_at, 0, -1, 0, 0)


@njit(cache=True, nogil=True)
def _clear_node(nodes_at, weights_at, node, token, depth, rank):
    nodes = matrix_at(nodes_at, NODE_COLUMNS, np.int32)
    weights = matrix_at(weights_at, WEIGHT_COLUMNS, np.float64)
    nodes[node, TOKEN] = token
    nodes[node, FIRST_CHILD] = -1
    nodes[node, LAST_CHILD] = -1
    nodes[node, NEXT_SIBLING] = -1
    nodes[node, PLACE] = -1
    nodes[node, DEPTH] = depth
    nodes[node, RANK] = rank
    nodes[node, SOURCES] = 0
    nodes[node, INPUT_LENGTH] = 0
    nodes[node, DATASTORE_LENGTH] = 0
    nodes[node, REST_END] = 0
    for column in range(WEIGHT_COLUMNS):
        weights[node, column] = 0.0


@njit(cache=True, nogil=True)
def fold(
    tree, size, texts, zero, segment, tokens_at, like, position, end, length, weight, number, origin
):
    """Adds the continuation tokens[position:end], up to a separator; returns the tree's new size.

    segment: the sub-index that tokens belong to, or
    INPUT. tokens_at, like: address and a sample of its tokens. length: of the match before it.
    weight: of this occurrence. number: of the continuation, rising from call to call. origin:
    SOURCE_* where it comes from; for the input it is found here.
    """
    nodes_at, weights_at, keys_at, children_at, slots = tree
    nodes = matrix_at(nodes_at, NODE_COLUMNS, np.int32)
    weights = matrix_at(weights_at, WEIGHT_COLUMNS, np.float64)
    prompt_size, separator = texts[1], texts[3]
    source = np.int64(segment != INPUT)
    node = np.int64(0)
    while position < end:
        token = np.int64(load(tokens_at, position, like))
        if token == separator and segment != INPUT:
            break
        weights[node, CHILDREN + source] += weight
        if nodes[node, INPUT_LENGTH + source] < length:
            nodes[node, INPUT_LENGTH + source] = length
        if segment == INPUT:
            origin = SOURCE_PROMPT if position < prompt_size else SOURCE_SELF_OUTPUT
        position += 1
        child = np.int64(nodes[node, LAST_CHILD])
        if child >= 0 and nodes[child, TOKEN] != token:
            if nodes[node, FIRST_CHILD] == child:
                child = np.int64(-1)
            else:
                child = _find_child(keys_at, children_at, slots, node, token)
        if child < 0:
            depth = nodes[node, DEPTH] + 1
            _clear_node(nodes_at, weights_at, size, token, depth, number * RANK_DEPTHS + depth)
            weights[size, source] = weight
            nodes[size, SOURCES] = origin
            nodes[size, REST_SEGMENT] = segment
            nodes[size, REST_POSITION] = position
            nodes[size, REST_END] = end if position < end else 0
            nodes[size, REST_LENGTH] = length
            _link_child(nodes_at, keys_at, children_at, slots, node, size)
            return size + 1
        if nodes[child, REST_END] > 0:  # before anything of it changes
            size = unfold(nodes_at, weights_at, size, texts, zero, child)
        weights[child, source] += weight
        nodes[child, SOURCES] |= origin
        node = child
    return size


@njit(cache=True, nogil=True)
def unfold(nodes_at, weights_at, size, texts, zero, node):
    """Makes the child that was only noted; returns the tree's new size."""
    nodes = matrix_at(nodes_at, NODE_COLUMNS, np.int32)
    weights = matrix_at(weights_at, WEIGHT_COLUMNS, np.float64)
    seen_at, prompt_size, segments_at, separator = texts
    segment = np.int64(nodes[node, REST_SEGMENT])
    position = np.int64(nodes[node, REST_POSITION])
    end = np.int64(nodes[node, REST_END])
    nodes[node, REST_END] = 0
    origin = nodes[node, SOURCES]
    if segment == INPUT:
        source = col.OF_INPUT
        token = np.int64(load(seen_at, position, np.int32(0)))
        origin = SOURCE_PROMPT if position < prompt_size else SOURCE_SELF_OUTPUT
    else:
        source = col.OF_DATASTORE
        segments = matrix_at(segments_at, col.SEGMENT_COLUMNS, np.int64)
        token = np.int64(load(segments[segment, col.TOKENS_AT], position, zero))
        if token == separator:
            return size
    # One continuation has come here, and so its weight is the node's.
    weight = weights[node, source]
    weights[node, CHILDREN + source] = weight
    nodes[node, INPUT_LENGTH + source] = nodes[node, REST_LENGTH]
    nodes[node, FIRST_CHILD] = size
    nodes[node, LAST_CHILD] = size
    _clear_node(nodes_at, weights_at, size, token, nodes[node, DEPTH] + 1, nodes[node, RANK] + 1)
    weights[size, source] = weight
    nodes[size, SOURCES] = origin
    nodes[size, REST_SEGMENT] = segment
    nodes[size, REST_POSITION] = position + 1
    nodes[size, REST_END] = end if position + 1 < end else 0
    nodes[size, REST_LENGTH] = nodes[node, REST_LENGTH]
    return size + 1


@njit(cache=True, nogil=True)
def _link_child(nodes_at, keys_at, children_at, slots, node, child):
    nodes = matrix_at(nodes_at, NODE_COLUMNS, np.int32)
    last = np.int64(nodes[node, LAST_CHILD])
    nodes[node, LAST_CHILD] = child
    if last < 0:  # an only child is found without the table
        nodes[node, FIRST_CHILD] = child
        return
    nodes[last, NEXT_SIBLING] = child
    if last == nodes[node, FIRST_CHILD]:
        _note_child(keys_at, children_at, slots, node, np.int64(nodes[last, TOKEN]), last)
    _note_child(keys_at, children_at, slots, node, np.int64(nodes[child, TOKEN]), child)


@njit(cache=True, nogil=True)
def _child_key(stamp, node, token):
    return (
        (stamp << np.uint64(_TOKEN_BITS + _NODE_BITS))
        | (np.uint64(node) << np.uint64(_TOKEN_BITS))
        | np.uint64(token)
    )


@njit(cache=True, nogil=True)
def _slot(key, slots):
    """Fibonacci hashing: the product's high bits depend on all of the key."""
    return np.int64((key * _GOLDEN) >> np.uint64(36)) & (slots - 1)


@njit(cache=True, nogil=True)
def _find_child(keys_at, children_at, slots, node, token):
    keys = vector_at(keys_at, np.uint64)
    stamp = keys[slots]
    key = _child_key(stamp, node, token)
    slot = _slot(key, slots)
    while keys[slot] != key:
        if keys[slot] >> np.uint64(_TOKEN_BITS + _NODE_BITS) != stamp:
            return np.int64(-1)
        slot = (slot + 1) & (slots - 1)
    return np.int64(vector_at(children_at, np.int32)[slot])


@njit(cache=True, nogil=True)
def _note_child(keys_at, children_at, slots, node, token, child):
    keys = vector_at(keys_at, np.uint64)
    stamp = keys[slots]
    key = _child_key(stamp, node, token)
    slot = _slot(key, slots)
    while keys[slot] >> np.uint64(_TOKEN_BITS + _NODE_BITS) == stamp:
        slot = (slot + 1) & (slots - 1)
    keys[slot] = key
    vector_at(children_at, np.int32)[slot] = child


@njit(cache=True, nogil=True)
def draft_best_first(
    tree, size, texts, zero, source_weights, length_weights, novelty, bigrams, min_prob, budget,
    heap_probs_at, heap_keys_at, draft,
):  # fmt: skip
    """Takes nodes in the order of their path probabilities (RetrievalConfig's estimator).

    Among equals the one that a continuation reached first. bigrams: addresses of the last token's
    row of each table of Bigrams, and how many columns are known. draft: addresses of the arrays
    for tokens, parents, probs and sources. Returns how many were taken.
    """
    tokens_at, parents_at, probs_at, sources_at = draft
    nodes_at, weights_at = tree[0], tree[1]
    nodes = matrix_at(nodes_at, NODE_COLUMNS, np.int32)
    weights = matrix_at(weights_at, WEIGHT_COLUMNS, np.float64)
    heap_probs = vector_at(heap_probs_at, np.float64)
    heap_keys = vector_at(heap_keys_at, np.int64)
    drafted = heap = 0
    node = np.int64(0)
    path = 1.0
    while True:
        if nodes[node, REST_END] > 0:
            size = unfold(nodes_at, weights_at, size, texts, zero, node)
        depth = np.int64(nodes[node, DEPTH])
        longest = np.int64(nodes[node, INPUT_LENGTH])
        unseen = length_weights[col.OF_INPUT, longest] * novelty[col.OF_INPUT, longest + depth]
        total = weights[node, CHILDREN + col.OF_INPUT]
        scale = 0.0
        longest = np.int64(nodes[node, DATASTORE_LENGTH])
        if longest > 0:
            evidence = weights[node, CHILDREN + col.OF_DATASTORE]
            longest_weight = length_weights[col.OF_DATASTORE, longest]
            most = source_weights[col.DATASTORE_CAP] * longest_weight
            scale = source_weights[col.DATASTORE_WEIGHT] * min(1.0, most / evidence)
            total += scale * evidence
            unnoted = scale * longest_weight * novelty[col.OF_DATASTORE, longest + depth]
            unseen = max(unseen, unnoted)
        total += unseen
        # Deeper ones gain nothing on what RetrievalConfig's constants were fitted on.
        if node == 0 and bigrams[2] > 0:
            if total == 0.0:  # nothing was seen of what follows
                total = unseen = 1.0
            size = _add_bigrams(nodes_at, weights_at, size, texts, zero, bigrams, unseen)
        place = nodes[node, PLACE]
        child = np.int64(nodes[node, FIRST_CHILD])
        while child >= 0:
            weight = weights[child, col.OF_INPUT] + scale * weights[child, col.OF_DATASTORE]
            prob = path * weight / total
            if prob >= min_prob and prob > 0.0:
                nodes[child, PLACE] = place  # the parent's until it gets its own
                key = (np.int64(nodes[child, RANK]) << 32) | child
                heap_push(heap_probs, heap_keys, heap, prob, key)
                heap += 1
            child = np.int64(nodes[child, NEXT_SIBLING])
        if heap == 0:
            return drafted
        path = heap_probs[0]
        node = heap_keys[0] & 0xFFFFFFFF
        heap -= 1
        heap_pop(heap_probs, heap_keys, heap)
        vector_at(tokens_at, np.int32)[drafted] = nodes[node, TOKEN]
        vector_at(parents_at, np.int32)[drafted] = nodes[node, PLACE]
        vector_at(probs_at, np.float32)[drafted] = path
        vector_at(sources_at, np.int8)[drafted] = nodes[node, SOURCES]
        nodes[node, PLACE] = drafted
        drafted += 1
        if drafted == budget:
            return drafted


@njit(cache=True, nogil=True)
def _add_bigrams(nodes_at, weights_at, size, texts, zero, bigrams, unseen):
    """Shares the weight of what was not seen after the root; returns the tree's new size."""
    nodes = matrix_at(nodes_at, NODE_COLUMNS, np.int32)
    weights = matrix_at(weights_at, WEIGHT_COLUMNS, np.float64)
    tokens = vector_at(bigrams[0], np.int32)
    probs = vector_at(bigrams[1], np.float32)
    for column in range(bigrams[2]):
        token = np.int64(tokens[column])
        child = np.int64(nodes[0, FIRST_CHILD])
        while child >= 0 and nodes[child, TOKEN] != token:
            child = np.int64(nodes[child, NEXT_SIBLING])
        if child < 0:
            child = np.int64(size)
            size += 1
            _clear_node(nodes_at, weights_at, child, token, 1, _LAST_RANK)
            # Children are not looked up any more: the hash table need not know of it.
            last = np.int64(nodes[0, LAST_CHILD])
            if last < 0:
                nodes[0, FIRST_CHILD] = child
            else:
                nodes[last, NEXT_SIBLING] = child
            nodes[0, LAST_CHILD] = child
        elif nodes[child, REST_END] > 0:
            # Its only child has the weight that it has by what was seen.
            size = unfold(nodes_at, weights_at, size, texts, zero, child)
        weights[child, col.OF_INPUT] += unseen * probs[column]
        nodes[child, SOURCES] |= SOURCE_BIGRAM
    return size
