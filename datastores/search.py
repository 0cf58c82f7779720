"""Search in suffix arrays, many searches in step so that their waits for memory overlap.

A search first narrows down to LANDMARK_EVERY suffixes on the landmarks, which stay in the cache,
then compares with suffixes. One binary search alone would wait for memory at each of its last
steps; here the searches of several prefix lengths in all sub-indices take each step together,
look at several places at once, and ask for what they will read before they need it.
"""

import numpy as np
from numba import njit

from . import columns as col
from .pointers import array_at, load, matrix_at, prefetch, vector_at
from .suffix_array import LANDMARK_EVERY

LENGTHS_AT_ONCE = 4
_PROBE_BITS = 3
_PROBES = (1 << _PROBE_BITS) - 1
# Columns of a search: the interval where its answer is, which end of the matches it looks for,
# the first query token, the sub-index, the positions it looks at.
_LOW, _HIGH, _END, _START, _SEGMENT, _POSITIONS = range(6)
SEARCH_COLUMNS = _POSITIONS + _PROBES
_LOWER, _UPPER, _BOTH = range(3)
# Columns of the keys that one call searches for, in the first rows of the same array.
_KEY, _BASE = range(2)
_LINE = 64


def search_rows(num_segments: int) -> int:
    """Rows of the scratch array that find_intervals() needs."""
    return 2 * LENGTHS_AT_ONCE * (1 + num_segments)


@njit(cache=True, nogil=True)
def find_intervals(
    segments_at, num_segments, query_at, query_size, first, last, separator, bits, per_key, zero,
    intervals_at, searches_at,
):  # fmt: skip
    """Where each of query[first:], ..., query[last - 1:] occurs in each sub-index.

    segments_at: address of Snapshot.table. query_at: of the query, int32. bits, per_key:
    tokens_per_key(). zero: of the tokens' dtype. intervals_at: of int64[>= last, num_segments,
    2], gets [start, s] = (low, high): suffixes[low:high] of sub-index s are all that begin with
    query[start:]. searches_at: of int64[search_rows(num_segments), SEARCH_COLUMNS], scratch. At
    most LENGTHS_AT_ONCE at a time.
    """
    segments = matrix_at(segments_at, col.SEGMENT_COLUMNS, np.int64)
    intervals = vector_at(intervals_at, np.int64)
    keys_at = searches_at
    searches_at += 8 * SEARCH_COLUMNS * 2 * LENGTHS_AT_ONCE
    searches = matrix_at(searches_at, SEARCH_COLUMNS, np.int64)
    keys = _make_keys(query_at, query_size, first, last, bits, per_key, keys_at)
    active = 0
    for s in range(num_segments):
        _search_landmarks(segments, s, keys, keys_at)
        key = 0
        for start in range(first, last):
            known = min(per_key, query_size - start)
            active = _note_searches(
                segments, s, start, known == query_size - start, keys_at, key, known < per_key,
                intervals, col.INTERVAL_COLUMNS * (start * num_segments + s), searches, active,
            )  # fmt: skip
            key += 1 + (known < per_key)
    while active > 0:
        for i in range(active):
            s = searches[i, _SEGMENT]
            low, high = searches[i, _LOW], searches[i, _HIGH]
            suffixes = vector_at(segments[s, col.SUFFIXES_AT], np.int32)
            for p in range(_PROBES):
                position = np.int64(suffixes[_probe(low, high, p)])
                searches[i, _POSITIONS + p] = position
                prefetch(segments[s, col.TOKENS_AT], position, zero)
        kept = extra = 0
        for i in range(active):
            s, start, end = searches[i, _SEGMENT], searches[i, _START], searches[i, _END]
            low, high = searches[i, _LOW], searches[i, _HIGH]
            old_low, old_high = low, high
            left, right = 0, _PROBES
            interval = col.INTERVAL_COLUMNS * (start * num_segments + s)
            while left < right:
                p = (left + right) >> 1
                order = _compare_prefix(
                    segments[s, col.TOKENS_AT], segments[s, col.NUM_TOKENS],
                    searches[i, _POSITIONS + p], query_at + 4 * start, query_size - start,
                    separator, zero,
                )  # fmt: skip
                middle = _probe(old_low, old_high, p)
                if order == 0 and end == _BOTH:
                    end = _LOWER
                    if middle + 1 < high:
                        _note_search(
                            segments, searches, active + extra, middle + 1, high, _UPPER, start, s
                        )
                        extra += 1
                    else:
                        intervals[interval + col.BEHIND] = high
                if order < 0 or (order == 0 and end == _UPPER):
                    low = middle + 1
                    left = p + 1
                else:
                    high = middle
                    right = p
            if low < high:
                _note_search(segments, searches, kept, low, high, end, start, s)
                kept += 1
            else:
                if end != _UPPER:
                    intervals[interval] = low
                if end != _LOWER:
                    intervals[interval + col.BEHIND] = low
        for i in range(extra):
            for column in range(_POSITIONS):
                searches[kept + i, column] = searches[active + i, column]
        active = kept + extra


@njit(cache=True, nogil=True)
def _make_keys(query_at, query_size, first, last, bits, per_key, keys_at):
    """The smallest and largest keys of suffixes that begin with query[start:], for each start.

    Two rows for each, or one where the two are the same. Returns the number of rows.
    """
    keys = matrix_at(keys_at, SEARCH_COLUMNS, np.uint64)
    rows = 0
    for start in range(first, last):
        known = min(per_key, query_size - start)
        key = np.uint64(0)
        for k in range(start, start + known):
            key = (key << np.uint64(bits)) | np.uint64(load(query_at, k, np.int32(0)) + 1)
        unknown = np.uint64(bits * (per_key - known))
        key = key << unknown
        keys[rows, _KEY] = key
        rows += 1
        if known < per_key:
            keys[rows, _KEY] = key | ((np.uint64(1) << unknown) - np.uint64(1))
            rows += 1
    return rows


@njit(cache=True, nogil=True)
def _search_landmarks(segments, s, count, keys_at):
    """How many landmarks are below each key, into the rows of keys_at.

    Halves the array without branches, for all keys in step, and asks three halvings ahead for
    what they may read; once little is left, for all of it.
    """
    landmarks_at = segments[s, col.LANDMARKS_AT]
    bases = matrix_at(keys_at, SEARCH_COLUMNS, np.int64)
    size = segments[s, col.NUM_LANDMARKS]
    for i in range(count):
        bases[i, _BASE] = 0
    while size > LANDMARK_EVERY:
        half = size >> 1
        quarter = (size - half) >> 1
        eighth = (size - half - quarter) >> 1
        for i in range(count):
            base = bases[i, _BASE] - 1
            prefetch(landmarks_at, base + half, np.int64(0))
            for start in (base, base + half):
                prefetch(landmarks_at, start + quarter, np.int64(0))
                prefetch(landmarks_at, start + eighth, np.int64(0))
                prefetch(landmarks_at, start + quarter + eighth, np.int64(0))
        for step in (half, quarter, eighth):
            _halve(landmarks_at, keys_at, count, step)
            size -= step
    for i in range(count):
        for at in range(0, size, _LINE // 8):
            prefetch(landmarks_at, bases[i, _BASE] + at, np.int64(0))
    while size > 0:
        half = max(1, size >> 1)
        _halve(landmarks_at, keys_at, count, half)
        size -= half


@njit(cache=True, nogil=True)
def _halve(landmarks_at, keys_at, count, half):
    """Moves each key's base on by `half` if the landmark before that is below the key."""
    landmarks = vector_at(landmarks_at, np.uint64)
    keys = matrix_at(keys_at, SEARCH_COLUMNS, np.uint64)
    bases = matrix_at(keys_at, SEARCH_COLUMNS, np.int64)
    for i in range(count):
        base = bases[i, _BASE]
        bases[i, _BASE] = base + half * np.int64(landmarks[base + half - 1] < keys[i, _KEY])


@njit(cache=True, nogil=True)
def _note_searches(
    segments, s, start, key_is_all, keys_at, key, two, intervals, interval, searches, active
):
    """Notes what the landmarks leave to be searched; returns how many searches there are now."""
    landmarks = array_at(segments[s, col.LANDMARKS_AT], segments[s, col.NUM_LANDMARKS], np.uint64)
    num_suffixes = segments[s, col.NUM_SUFFIXES]
    bases = matrix_at(keys_at, SEARCH_COLUMNS, np.int64)
    keys = matrix_at(keys_at, SEARCH_COLUMNS, np.uint64)
    lower, upper = bases[key, _BASE], bases[key + two, _BASE]
    upper = _count_up_to(landmarks, keys[key + two, _KEY], upper)
    low = max(0, (lower - 1) * LANDMARK_EVERY + 1)
    high = min(upper * LANDMARK_EVERY, num_suffixes)
    if lower == upper or not key_is_all:
        if low < high:
            _note_search(segments, searches, active, low, high, _BOTH, start, s)
            return active + 1
        intervals[interval] = intervals[interval + col.BEHIND] = high
        return active
    # The landmarks between the two begin with the query.
    if low < lower * LANDMARK_EVERY:
        _note_search(segments, searches, active, low, lower * LANDMARK_EVERY, _LOWER, start, s)
        active += 1
    else:
        intervals[interval] = low
    low = (upper - 1) * LANDMARK_EVERY + 1
    if low < high:
        _note_search(segments, searches, active, low, high, _UPPER, start, s)
        active += 1
    else:
        intervals[interval + col.BEHIND] = high
    return active


@njit(cache=True, nogil=True)
def _note_search(segments, searches, i, low, high, end, start, s):
    """Writes down a search, and asks for the suffixes that it reads next."""
    searches[i, _LOW] = low
    searches[i, _HIGH] = high
    searches[i, _END] = end
    searches[i, _START] = start
    searches[i, _SEGMENT] = s
    if high - low <= LANDMARK_EVERY:
        for at in range(low, high, _LINE // 4):
            prefetch(segments[s, col.SUFFIXES_AT], at, np.int32(0))
        prefetch(segments[s, col.SUFFIXES_AT], (high - 1), np.int32(0))
    else:
        for p in range(_PROBES):
            prefetch(segments[s, col.SUFFIXES_AT], _probe(low, high, p), np.int32(0))


@njit(cache=True, nogil=True)
def _probe(low, high, p):
    """Where the p-th look at an interval goes; in a short one some go to the same place."""
    return low + (((high - low) * (p + 1)) >> _PROBE_BITS)


@njit(cache=True, nogil=True)
def _count_up_to(landmarks, key, low):
    """How many landmarks are not larger; the first `low` are not. Gallops from there."""
    size = np.int64(landmarks.size)
    step = np.int64(1)
    high = low
    while high < size and landmarks[high] <= key:
        low = high + 1
        high = low + step
        step *= 2
    high = min(high, size)
    while low < high:
        middle = (low + high) >> 1
        if landmarks[middle] <= key:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)
def _compare_prefix(tokens_at, num_tokens, position, query_at, query_size, separator, zero):
    """-1, 0 or 1 as the suffix at position sorts before, begins with, or sorts after the query.

    Only a damaged file has positions where there are no tokens; nothing is read there.
    """
    size = query_size
    if position < 0 or position + size > num_tokens:
        size = num_tokens - position if position >= 0 else 0
    for k in range(size):
        token = np.int64(load(tokens_at, position + k, zero))
        wanted = np.int64(load(query_at, k, np.int32(0)))
        if token != wanted:
            return -1 if token == separator or token < wanted else 1
    return 0
