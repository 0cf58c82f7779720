"""What one request has seen so far (prompt and self-output), searchable at its end.

SSSD's Algorithm 1 keeps a trie with counts over all positions, of which a step reads only the
part under the last P tokens. Here each position links to the previous one with the same token,
and with the same two tokens; a step follows the links from the end and builds just that part
of the trie. The counts are the trie's, at a tenth of its memory and insertion cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from . import columns as col
from .config import DatastoreError, RetrievalConfig

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
        self._seen = 0
        self._size = 0
        self._prompt: int | None = None  # how many of the tokens kept are the prompt's
        self._tokens = np.empty(0, np.int32)
        self._grow(_MIN_CAPACITY)

    def __len__(self) -> int:
        """Tokens seen, those forgotten included."""
        return self._seen

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
        self._seen += new.size
        if self._prompt is None:
            self._prompt = new.size
        limit = self.config.max_input_tokens
        if self._size + new.size > limit:
            kept = np.concatenate((self._tokens[: self._size], new))[-((limit + 1) // 2) :]
            self._prompt = max(0, self._prompt - (self._size + new.size - kept.size))
            self._size = 0
            self._last_one.fill(0)
            self._last_two.fill(0)
            new = kept
        room = min(self._size + new.size + MOST_SUPPOSED, limit)
        if room > self._capacity:
            self._grow(max(room, 2 * self._capacity))
        self._append(new)

    def supposing(self, tokens: Sequence[int] | np.ndarray) -> "SupposedInput | None":
        """This request as if it had gone on with so many tokens; nothing of it changes.

        What is found for it is what would be found after extend(tokens). It holds until the next
        call of supposing() or extend(), whichever thread makes it: the tokens are written behind
        those that count, and never become part of them. None: they are more than MOST_SUPPOSED,
        the older half would be forgotten, or there is no prompt yet.
        """
        new = as_token_ids(tokens, _MAX_TOKEN)
        longest = min(MOST_SUPPOSED, self.config.max_input_tokens - self._size)
        if new.size > longest or self._prompt is None:
            return None
        _suppose(*self._arrays, self._size, new)
        row = self._row.copy()
        row[col.SEEN_SIZE] += new.size
        return SupposedInput(row, self._searched)

    def _append(self, new: np.ndarray) -> None:
        _append(*self._arrays, self._size, new)
        self._size += new.size
        self._row[col.SEEN_SIZE] = self._size
        self._row[col.PROMPT_SIZE] = self.prompt_tokens

    def _grow(self, capacity: int) -> None:
        kept = self._tokens[: self._size]
        self._capacity = 1 << (capacity - 1).bit_length()
        self._tokens = np.empty(self._capacity, np.int32)
        self._same_one = np.empty(self._capacity, np.int32)
        self._same_two = np.empty(self._capacity, np.int32)
        # Hash tables with open addressing, at most half full; an entry is a position + 1.
        self._last_one = np.zeros(2 * self._capacity, np.int32)
        self._last_two = np.zeros(2 * self._capacity, np.int32)
        # What the compiled search needs, in the order of columns.py: addresses, then sizes.
        self._searched = (self._tokens, self._same_one, self._same_two)
        self._row = np.array([*(array.ctypes.data for array in self._searched), 0, 0], np.int64)
        self._size = 0
        self._append(kept)


@dataclass(frozen=True, slots=True, eq=False)
class SupposedInput:
    """A request as it might go on, to be searched for as an InputTrie is."""

    _row: np.ndarray
    _searched: tuple[np.ndarray, ...]


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
def _append(tokens, same_one, same_two, last_one, last_two, size, new):
    for k in range(new.size):
        position = size + k
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


@njit(cache=True, nogil=True)
def _suppose(tokens, same_one, same_two, last_one, last_two, size, new):
    """As _append, but the hash tables stay as they are: they name the last of the tokens before."""
    for k in range(new.size):
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
