"""Suffix arrays over documents of token ids, compiled, without the GIL.

A token array is uint16 or uint32 and holds documents one after another, each closed by the
separator id (= vocab_size). Its suffix array is int32, one entry per token that is not a
separator, ordered by the first SORT_DEPTH tokens, then by position; the end of a document sorts
before every token and nothing is compared beyond it.

Why not pydivsufsort: it sorts bytes, so token arrays need 2 or 4 times its work and memory, a
filter afterwards, and 64-bit indices from 512M uint32 tokens on; sorting to a bounded depth gives
all that retrieval needs, at 4 bytes per token, and two such arrays can be merged in linear time.
"""

import numpy as np
from numba import njit

from .config import SORT_DEPTH

# Every so many suffixes one has its first tokens noted, as one integer: a search narrows an
# interval down to this many on a small array before it touches suffixes and tokens.
LANDMARK_EVERY = 64
_RADIX_BITS = 11
_INSERTION_RUN = 16


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """The narrowest dtype for ids 0..vocab_size (the separator is vocab_size itself)."""
    return np.uint16 if vocab_size <= np.iinfo(np.uint16).max else np.uint32


def tokens_per_key(vocab_size: int) -> tuple[int, int]:
    """(bits per token, tokens) of the integers that stand for the beginning of a suffix."""
    bits = max(1, int(vocab_size).bit_length())
    return bits, min(64 // bits, SORT_DEPTH)


def make_landmarks(tokens: np.ndarray, suffixes: np.ndarray, vocab_size: int) -> np.ndarray:
    """uint64[ceil(suffixes.size / LANDMARK_EVERY)]: keys of every LANDMARK_EVERY-th suffix.

    They rise along the array; equal ones stand for suffixes that agree in a key's tokens.
    """
    return _landmarks(tokens, suffixes, vocab_size, *tokens_per_key(vocab_size))


def suffix_sort(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Suffix array (int32[number of tokens that are no separator]) of a token array.

    tokens must end with the separator if it is not empty. Takes about 24 bytes per token of
    working memory.
    """
    order = _positions(tokens, vocab_size)
    _sort_positions(tokens, order, vocab_size, *tokens_per_key(vocab_size))
    return order


@njit(cache=True, nogil=True)
def _positions(tokens, separator):
    count = 0
    for token in tokens:
        if token != separator:
            count += 1
    order = np.empty(count, np.int32)
    count = 0
    for position in range(tokens.size):
        if tokens[position] != separator:
            order[count] = position
            count += 1
    return order


@njit(cache=True, nogil=True)
def _key(tokens, position, separator, bits, per_key):
    """per_key tokens as one integer that orders as they do; 0 stands for the document's end."""
    key = np.uint64(0)
    ended = False
    for k in range(position, min(position + per_key, tokens.size)):
        token = np.int64(tokens[k])
        ended |= token == separator
        key = (key << np.uint64(bits)) | np.uint64(token + 1)
    if not ended:  # nearly always, and so the loop above has no branch to mispredict
        return key
    key = np.uint64(0)
    ended = False
    for k in range(per_key):
        key = key << np.uint64(bits)
        if not ended:
            token = np.int64(tokens[position + k])
            ended = token == separator
            if not ended:
                key = key | np.uint64(token + 1)
    return key


@njit(cache=True, nogil=True)
def _landmarks(tokens, suffixes, separator, bits, per_key):
    keys = np.empty((suffixes.size + LANDMARK_EVERY - 1) // LANDMARK_EVERY, np.uint64)
    for i in range(keys.size):
        keys[i] = _key(tokens, suffixes[i * LANDMARK_EVERY], separator, bits, per_key)
    return keys


@njit(cache=True, nogil=True)
def _sort_positions(tokens, order, separator, bits, per_key):
    n = order.size
    keys = np.empty(n, np.uint64)
    spare_keys = np.empty(n, np.uint64)
    spare_order = np.empty(n, np.int32)
    for i in range(n):
        keys[i] = _key(tokens, order[i], separator, bits, per_key)
    _radix_sort(keys, order, spare_keys, spare_order, bits * per_key)
    tied = np.zeros(n + 1, np.bool_)  # tied[i]: i equals i - 1 so far and neither has ended
    last = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    for i in range(1, n):
        tied[i] = keys[i] == keys[i - 1] and (keys[i] & last) != np.uint64(0)
    depth = per_key
    while depth < SORT_DEPTH:
        width = min(per_key, SORT_DEPTH - depth)
        start = 0
        while start < n:
            stop = start + 1
            while tied[stop]:
                stop += 1
            if stop - start > 1:
                for i in range(start, stop):
                    keys[i] = _key(tokens, order[i] + depth, separator, bits, width)
                _merge_sort(keys, order, spare_keys, spare_order, start, stop)
                for i in range(start + 1, stop):
                    tied[i] = keys[i] == keys[i - 1] and (keys[i] & last) != np.uint64(0)
            start = stop
        depth += width


@njit(cache=True, nogil=True)
def _radix_sort(keys, order, spare_keys, spare_order, bits):
    """Stable sort of both arrays by key, least significant digit first."""
    n = keys.size
    passes = (bits + _RADIX_BITS - 1) // _RADIX_BITS
    buckets = 1 << _RADIX_BITS
    mask = np.uint64(buckets - 1)
    counts = np.zeros((passes, buckets), np.int64)
    for i in range(n):
        key = keys[i]
        for p in range(passes):
            counts[p, np.int64(key & mask)] += 1
            key = key >> np.uint64(_RADIX_BITS)
    source_keys, source_order = keys, order
    target_keys, target_order = spare_keys, spare_order
    for p in range(passes):
        shift = np.uint64(p * _RADIX_BITS)
        total = 0
        for bucket in range(buckets):
            total += counts[p, bucket]
            counts[p, bucket] = total - counts[p, bucket]
        for i in range(n):
            key = source_keys[i]
            digit = np.int64((key >> shift) & mask)
            target = counts[p, digit]
            counts[p, digit] = target + 1
            target_keys[target] = key
            target_order[target] = source_order[i]
        source_keys, target_keys = target_keys, source_keys
        source_order, target_order = target_order, source_order
    if passes % 2 == 1:
        keys[:] = spare_keys
        order[:] = spare_order


@njit(cache=True, nogil=True)
def _merge_sort(keys, order, spare_keys, spare_order, start, stop):
    """Stable sort of keys[start:stop] and order[start:stop] by key."""
    for low in range(start, stop, _INSERTION_RUN):
        for i in range(low + 1, min(low + _INSERTION_RUN, stop)):
            key = keys[i]
            position = order[i]
            j = i
            while j > low and keys[j - 1] > key:
                keys[j] = keys[j - 1]
                order[j] = order[j - 1]
                j -= 1
            keys[j] = key
            order[j] = position
    width = _INSERTION_RUN
    while width < stop - start:
        for low in range(start, stop, 2 * width):
            middle = min(low + width, stop)
            high = min(low + 2 * width, stop)
            if middle >= high or keys[middle - 1] <= keys[middle]:
                continue
            spare_keys[low:middle] = keys[low:middle]
            spare_order[low:middle] = order[low:middle]
            left, right, out = low, middle, low
            while left < middle and right < high:
                if spare_keys[left] <= keys[right]:
                    keys[out] = spare_keys[left]
                    order[out] = spare_order[left]
                    left += 1
                else:
                    keys[out] = keys[right]
                    order[out] = order[right]
                    right += 1
                out += 1
            while left < middle:
                keys[out] = spare_keys[left]
                order[out] = spare_order[left]
                left += 1
                out += 1
        width *= 2


@njit(cache=True, nogil=True)
def _not_after(tokens, a, b, separator):
    """Whether the suffix at a sorts before the one at b or ties with it."""
    for k in range(SORT_DEPTH):
        token_a = tokens[a + k]
        token_b = tokens[b + k]
        if token_a != token_b:
            return token_a == separator or (token_b != separator and token_a < token_b)
        if token_a == separator:
            return True
    return True


@njit(cache=True, nogil=True)
def merge_suffix_arrays(tokens, older, newer, offset, separator, merged, done, steps):
    """Merges two suffix arrays in bounded slices of work.

    tokens: both token arrays, the newer from `offset` on. older, newer: their suffix arrays
    (newer's positions count from its own start). merged: int32[older.size + newer.size], filled
    up to done[0] + done[1], the entries taken so far from each; at most `steps` more are taken.
    Returns True when all is merged.
    """
    i, j = done[0], done[1]
    stop = min(i + j + steps, merged.size)
    while i + j < stop:
        if j == newer.size or (
            i < older.size and _not_after(tokens, older[i], newer[j] + offset, separator)
        ):
            merged[i + j] = older[i]
            i += 1
        else:
            merged[i + j] = newer[j] + offset
            j += 1
    done[0], done[1] = i, j
    return stop == merged.size
