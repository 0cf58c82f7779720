"""A binary heap in two arrays: nodes by falling probability."""

from numba import njit


@njit(cache=True, nogil=True)
def _before(prob, node, other_prob, other_node):
    """More probable first; among equals the one found first, so that drafts are repeatable."""
    return prob > other_prob or (prob == other_prob and node < other_node)


@njit(cache=True, nogil=True)
def heap_push(heap_probs, heap_nodes, size, prob, node):
    place = size
    while place > 0:
        above = (place - 1) >> 1
        if not _before(prob, node, heap_probs[above], heap_nodes[above]):
            break
        heap_probs[place] = heap_probs[above]
        heap_nodes[place] = heap_nodes[above]
        place = above
    heap_probs[place] = prob
    heap_nodes[place] = node


@njit(cache=True, nogil=True)
def heap_pop(heap_probs, heap_nodes, size):
    """Removes the top; `size` entries remain, the last of which moves to its place."""
    prob, node = heap_probs[size], heap_nodes[size]
    place = 0
    while True:
        below = 2 * place + 1
        if below >= size:
            break
        if below + 1 < size and _before(
            heap_probs[below + 1], heap_nodes[below + 1], heap_probs[below], heap_nodes[below]
        ):
            below += 1
        if not _before(heap_probs[below], heap_nodes[below], prob, node):
            break
        heap_probs[place] = heap_probs[below]
        heap_nodes[place] = heap_nodes[below]
        place = below
    heap_probs[place] = prob
    heap_nodes[place] = node
