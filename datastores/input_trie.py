"""What one request has seen so far (prompt and self-output), searchable at its end.

SSSD's Algorithm 1 keeps a trie with counts over all positions, of which a step reads only the
part under the last P tokens. Here each position links to the previous one with the same token,
and with the same two tokens; a step follows the links from the end and builds just that part
of the trie. The counts are the trie's, at a tenth of its memory and insertion cost.
"""

from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np
from numba import njit

from . import columns as col
from .config import DatastoreError, RetrievalConfig
from .pointers import array_at, vector_at

_MIN_CAPACITY = 256
# Room behind the tokens for as many more as a supposed continuation may have.
MOST_SUPPOSED = 128
_MAX_TOKEN = np.iinfo(np.int32).max
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class InputTrie:
    """Tokens of one request: the first extend() brings the prompt, later ones its output.

    Memory is about 28 bytes per token, doubling as it grows, for at most
    config.max_input_tokens tokens; then the older half is forgotten. One thread at a time.
    """

    def __init__(self, config: RetrievalConfig | None = None) -> None:
        self.config = config or RetrievalConfig()
        self._forgotten = 0
        self._prompt: int | None = None  # how many of the tokens kept are the prompt's
        self._grow(_MIN_CAPACITY, np.empty(0, np.int32))

    def __len__(self) -> int:
        """Tokens seen, those forgotten included."""
        return self._forgotten + self._size

    @property
    def _size(self) -> int:
        return int(self._row[col.SEEN_SIZE])

    @property
    def tokens(self) -> np.ndarray:
        """int32: the tokens that are kept, read-only."""
        view = self._tokens[: self._size]
        view.flags.writeable = False
        return view

    @property
    def prompt_tokens(self) -> int:
        """How many of `tokens` are the prompt's; the rest is self-output."""
        return self._prompt or 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return sum(array.nbytes for array in self._arrays)

    @property
    def _arrays(self) -> tuple[np.ndarray, ...]:
        return self._tokens, self._same_one, self._same_two, self._last_one, self._last_two

    def extend(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Appends tokens (ids >= 0, one-dimensional) in constant time each."""
        new = as_token_ids(tokens, _MAX_TOKEN)
        if self._prompt is None:
            self._prompt = new.size
        limit = self.config.max_input_tokens
        if self._size + new.size > limit:
            new = self._forget(new)
        room = min(self._size + new.size + MOST_SUPPOSED, limit)
        if room > self._capacity:
            self._grow(max(room, 2 * self._capacity), self._tokens[: self._size])
        _append(self._row, new)
        self._row[col.PROMPT_SIZE] = self._prompt
        roomy = self._capacity >= limit
        self._row[col.FULL_AT] = limit if roomy else self._capacity - MOST_SUPPOSED

    def _forget(self, new: np.ndarray) -> np.ndarray:
        """Becomes empty; what is to be appended instead, the newer half of all and `new`."""
        kept = np.concatenate((self._tokens[: self._size], new))
        kept = kept[-((self.config.max_input_tokens + 1) // 2) :]
        forgotten = self._size + new.size - kept.size
        self._prompt = max(0, self.prompt_tokens - forgotten)
        self._forgotten += forgotten
        self._row[col.SEEN_SIZE] = 0
        self._last_one.fill(0)
        self._last_two.fill(0)
        return kept

    @property
    def room(self) -> int:
        """Tokens that it can be supposed to go on with (`datastores.supposed`).

        0 without a prompt, and where the older half would be forgotten.
        """
        if self._prompt is None:
            return 0
        return min(MOST_SUPPOSED, self.config.max_input_tokens - self._size)

    def _grow(self, capacity: int, kept: np.ndarray) -> None:
        self._capacity = 1 << (capacity - 1).bit_length()
        self._tokens = np.empty(self._capacity, np.int32)
        self._same_one = np.empty(self._capacity, np.int32)
        self._same_two = np.empty(self._capacity, np.int32)
        # Hash tables with open addressing, at most half full; an entry is a position + 1.
        self._last_one = np.zeros(2 * self._capacity, np.int32)
        self._last_two = np.zeros(2 * self._capacity, np.int32)
        # What the compiled search needs, in the order of columns.py.
        tokens, same_one, same_two, last_one, last_two = (a.ctypes.data for a in self._arrays)
        slots = self._last_one.size
        self._row = np.array(
            [tokens, same_one, same_two, 0, 0, last_one, last_two, slots, 0], np.int64
        )
        self._row_at = int(self._row.ctypes.data)
        _append(self._row, kept)


def extend_all(tries: Sequence[InputTrie], tokens: Sequence[Sequence[int]]) -> None:
    """Appends to each trie, which has its prompt, the tokens that stand in its place.

    As `extend` of each, in one compiled call where none grows.
    """
    new = as_token_ids(list(chain.from_iterable(tokens)), _MAX_TOKEN)
    ends = np.fromiter(accumulate(map(len, tokens)), np.int64, len(tokens))
    full = np.zeros(len(tries), np.bool_)
    _append_all(np.array([trie._row_at for trie in tries], np.int64), new, ends, full)
    for i in np.flatnonzero(full).tolist():
        tries[i].extend(tokens[i])


def as_token_ids(tokens: Sequence[int] | np.ndarray, largest: int) -> np.ndarray:
    """One-dimensional int32 array of ids 0..largest, or DatastoreError."""
    array = np.asarray(tokens)
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DatastoreError(
            f"tokens must be a one-dimensional list of whole numbers, got {array.ndim} "
            f"dimension(s) of {array.dtype}"
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > largest:
        wrong = low if low < 0 else high
        raise DatastoreError(f"token id {wrong} is outside 0..{largest}, the vocabulary")
    return np.ascontiguousarray(array, np.int32)


@njit(cache=True, nogil=True)
def _append_all(rows_at, new, ends, full):
    """Appends new[:ends[0]] to the first input, ...; none to one that had to grow, or to forget.

    rows_at: int64[n], addresses of inputs' rows. full: bool[n], set for those that nothing was
    appended to.
    """
    start = 0
    for i, row_at in enumerate(rows_at):
        row = vector_at(row_at, np.int64)
        if row[col.SEEN_SIZE] + ends[i] - start <= row[col.FULL_AT]:
            _append(row, new[start : ends[i]])
        else:
            full[i] = True
        start = ends[i]


@njit(cache=True, nogil=True)
def _append(row, new):
    """Appends tokens, int32, to an input, by its row (columns.py)."""
    tokens = vector_at(row[col.SEEN_AT], np.int32)
    same_one = vector_at(row[col.SAME_ONE_AT], np.int32)
    same_two = vector_at(row[col.SAME_TWO_AT], np.int32)
    last_one = array_at(row[col.LAST_ONE_AT], row[col.LAST_SLOTS], np.int32)
    last_two = array_at(row[col.LAST_TWO_AT], row[col.LAST_SLOTS], np.int32)
    for k in range(new.size):
        position = row[col.SEEN_SIZE] + k
        token = new[k]
        tokens[position] = token
        slot = _slot_of_one(tokens, last_one, token)
        same_one[position] = last_one[slot] - 1
        last_one[slot] = position + 1
        same_two[position] = -1
        if position > 0:
            slot = _slot_of_two(tokens, last_two, tokens[position - 1], token)
            same_two[position] = last_two[slot] - 1
            last_two[slot] = position + 1
    row[col.SEEN_SIZE] += new.size


@njit(cache=True, nogil=True)
def suppose(row, new_at, count):
    """Write `count` tokens behind those that an input has seen, as _append does.

    The hash tables stay as they are: they name the last of the tokens before. What was supposed
    behind the same input before is overwritten.

    Args:
        row: of an input (columns.py), SEEN_SIZE with the supposed tokens.
        new_at: address of int32[count].
    """
    new = vector_at(new_at, np.int32)
    tokens = vector_at(row[col.SEEN_AT], np.int32)
    same_one = vector_at(row[col.SAME_ONE_AT], np.int32)
    same_two = vector_at(row[col.SAME_TWO_AT], np.int32)
    last_one = array_at(row[col.LAST_ONE_AT], row[col.LAST_SLOTS], np.int32)
    last_two = array_at(row[col.LAST_TWO_AT], row[col.LAST_SLOTS], np.int32)
    size = row[col.SEEN_SIZE] - count
    for k in range(count):
        position = size + k
        token = new[k]
        tokens[position] = token
        one, two = np.int64(-1), np.int64(-1)
        for other in range(position - 1, size - 1, -1):
            if tokens[other] == token:
                if one < 0:
                    one = np.int64(other)
                if other > 0 and tokens[other - 1] == tokens[position - 1]:
                    two = np.int64(other)
                    break
        if one < 0:
            one = np.int64(last_one[_slot_of_one(tokens, last_one, token)] - 1)
        same_one[position] = one
        if two < 0 and position > 0:
            slot = _slot_of_two(tokens, last_two, tokens[position - 1], token)
            two = np.int64(last_two[slot] - 1)
        same_two[position] = two


@njit(cache=True, nogil=True)
def _slot_of_one(tokens, last_one, token):
    """Where the last position of a token is kept, or would be."""
    mask = np.int64(last_one.size - 1)
    slot = _slot(np.uint64(token), mask)
    while last_one[slot] != 0 and tokens[last_one[slot] - 1] != token:
        slot = (slot + 1) & mask
    return slot


@njit(cache=True, nogil=True)
def _slot_of_two(tokens, last_two, before, token):
    """The same of a token behind another one."""
    mask = np.int64(last_two.size - 1)
    slot = _slot((np.uint64(before) << np.uint64(32)) | np.uint64(token), mask)
    while last_two[slot] != 0:
        other = last_two[slot] - 1
        if tokens[other] == token and tokens[other - 1] == before:
            break
        slot = (slot + 1) & mask
    return slot


@njit(cache=True, nogil=True)
def _slot(key, mask):
    """Fibonacci hashing: the product's high bits depend on all of the key."""
    return np.int64((key * _GOLDEN) >> np.uint64(32)) & mask


@njit(cache=True, nogil=True)
def find_occurrences(tokens, same_one, same_two, longest, limit, scan, found, lengths, buckets):
    """Earlier occurrences of the last 1..longest tokens, longest match first, then newest.

    Writes into found (int32[limit], the position after each occurrence) and lengths
    (int32[limit]); returns how many. Compares at most `scan` occurrences of the last two tokens
    and reads at most 4 * limit more of the last one. buckets: int32[longest + 1, limit + 1],
    scratch.
    """
    size = tokens.size
    if size < 2 or limit == 0:
        return 0
    for shorter in range(longest + 1):
        buckets[shorter, limit] = 0  # how many of this length there are
    full = np.int64(0)
    if longest >= 2:
        position = np.int64(same_two[size - 1])
        while position >= 0 and scan > 0 and full < limit:
            length = np.int64(2)
            while (
                length < longest
                and length <= position
                and tokens[position - length] == tokens[size - 1 - length]
            ):
                length += 1
            if buckets[length, limit] < limit:
                buckets[length, buckets[length, limit]] = position + 1
                buckets[length, limit] += 1
                if length == longest:
                    full += 1
            position = np.int64(same_two[position])
            scan -= 1
    count = np.int64(0)
    for matched in range(longest, 1, -1):
        for k in range(min(np.int64(buckets[matched, limit]), limit - count)):
            found[count] = buckets[matched, k]
            lengths[count] = matched
            count += 1
    position = np.int64(same_one[size - 1])
    tries = 4 * limit
    while position >= 0 and count < limit and tries > 0:
        if longest < 2 or position == 0 or tokens[position - 1] != tokens[size - 2]:
            found[count] = position + 1
            lengths[count] = 1
            count += 1
        position = np.int64(same_one[position])
        tries -= 1
    return count
