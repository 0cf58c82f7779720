"""A binary heap in two arrays: probabilities, largest first, and int64 keys, no two alike."""

from numba import njit


@njit(cache=True, nogil=True)
def _before(prob, key, other_prob, other_key):
    """More probable first; among equals the smaller key, so that drafts are repeatable."""
    return prob > other_prob or (prob == other_prob and key < other_key)


@njit(cache=True, nogil=True)
def heap_push(heap_probs, heap_keys, size, prob, key):
    place = size
    while place > 0:
        above = (place - 1) >> 1
        if not _before(prob, key, heap_probs[above], heap_keys[above]):
            break
        heap_probs[place] = heap_probs[above]
        heap_keys[place] = heap_keys[above]
        place = above
    heap_probs[place] = prob
    heap_keys[place] = key


@njit(cache=True, nogil=True)
def heap_pop(heap_probs, heap_keys, size):
    """Removes the top; `size` entries remain, the last of which moves to its place."""
    prob, key = heap_probs[size], heap_keys[size]
    place = 0
    while True:
        below = 2 * place + 1
        if below >= size:
            break
        if below + 1 < size and _before(
            heap_probs[below + 1], heap_keys[below + 1], heap_probs[below], heap_keys[below]
        ):
            below += 1
        if not _before(heap_probs[below], heap_keys[below], prob, key):
            break
        heap_probs[place] = heap_probs[below]
        heap_keys[place] = heap_keys[below]
        place = below
    heap_probs[place] = prob
    heap_keys[place] = key
