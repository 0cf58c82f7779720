"""Which tokens requests have written, and the additive penalties on them, on the host.

Float32 sums are made in the order of plain decoding (SGLang's sampling/penaltylib), which adds a
frequency penalty once for every occurrence: n additions do not give the bits of one product.
"""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from sglang_ext.tree import PackedTrees

_EMPTY = -1

Ids = npt.NDArray[np.int64]
Penalties = npt.NDArray[np.float32]


class TokenCounts:
    """A table with one row a request and one slot for each distinct token that it has written.

    A row's slots are filled in the order in which tokens first occur, so that slot
    `distinct[row] - 1` is the last one in use.

    Args:
        vocab_size: token ids outside of 0..vocab_size-1 are ignored.

    Attributes:
        tokens: int64[rows, slots], the token of each slot.
        distinct: int64[rows], slots in use.
        repetition: float32[rows], each request's repetition penalty.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._allocate(0, 0)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, slots)."""
        rows, slots = self.tokens.shape
        return rows, slots

    def grow(self, rows: int, slots: int) -> None:
        """Have `rows` rows of `slots` slots, a power of two; neither may shrink."""
        old = self._state()
        self._allocate(rows, slots)
        new = self._state()
        for before, after in zip(old, new, strict=True):
            after[tuple(slice(n) for n in before.shape)] = before
        _index_all(self._index, self.tokens, self.distinct)

    def start(self, row: int, frequency: float, presence: float, repetition: float) -> None:
        """Give a row to a request with these penalties that has written nothing."""
        self._frequency[row] = frequency
        self._presence[row] = presence
        self.repetition[row] = repetition
        self.distinct[row] = 0
        self._index[row] = _EMPTY

    def slots_needed(self, rows: Ids, ends: Ids, new: Ids) -> int:
        """Slots that the fullest row may need once these tokens are counted.

        Args:
            rows, ends, new: as in `count`.
        """
        lens = np.diff(ends, prepend=0)
        needed = self.distinct[rows] + lens
        # A recount's tokens are mostly repetitions: count those of the rows that seem too full.
        for i in np.flatnonzero(needed > self.shape[1]):
            needed[i] += len(np.unique(new[ends[i] - lens[i] : ends[i]])) - lens[i]
        return int(needed.max(initial=0))

    def count(self, rows: Ids, ends: Ids, new: Ids) -> tuple[Ids, Ids, Penalties]:
        """Count what requests have written since.

        Args:
            rows: int64[n].
            ends: int64[n], where each request's part of `new` ends.
            new: int64[m], their new tokens, one request's after the other's.

        Returns:
            of the slots that have changed (possibly several times the same):
            places: int64[k], row * slots + slot.
            tokens: int64[k].
            additive: float32[k], what is added to the token's logit from now on.
        """
        places, tokens = np.empty_like(new), np.empty_like(new)
        additive = np.empty(len(new), dtype=np.float32)
        n = _count(
            self._index, self.tokens, self._frequency_sums, self.distinct, self._frequency,
            self._presence, rows, ends, new, self._vocab_size, places, tokens, additive,
        )  # fmt: skip
        return places[:n], tokens[:n], additive[:n]

    def along_paths(
        self, rows: Ids, at: Ids, trees: PackedTrees
    ) -> tuple[Ids, Ids, Penalties, Penalties]:
        """The penalties on the tokens of each node's own path, which its request's lack.

        Args:
            rows: int64[n], the requests' rows here.
            at: int64[n], their rows in `trees`.

        Returns:
            for each node and each distinct token on its path, itself included, the root not:
            nodes: int64[k], flat indices (row of `trees` * width + node).
            tokens: int64[k].
            additive, scaling: float32[k], of a request whose output goes on with the path.
        """
        most = int(trees.depths[at].sum())
        nodes, tokens = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
        additive = np.empty(most, dtype=np.float32)
        scaling = np.empty(most, dtype=np.float32)
        n = _along_paths(
            self._index, self.tokens, self._frequency_sums, self._frequency, self._presence,
            self.repetition, rows, at, trees.tokens, trees.parents, trees.sizes,
            self._vocab_size, nodes, tokens, additive, scaling,
        )  # fmt: skip
        return nodes[:n], tokens[:n], additive[:n], scaling[:n]

    def _state(self) -> list[npt.NDArray[Any]]:
        """All but the index."""
        sums = self._frequency_sums
        return [
            self.tokens, sums, self.distinct, self._frequency, self._presence, self.repetition,
        ]  # fmt: skip

    def _allocate(self, rows: int, slots: int) -> None:
        self.tokens = np.zeros((rows, slots), dtype=np.int64)
        # Each slot's frequency penalty, summed over the token's occurrences.
        self._frequency_sums = np.zeros((rows, slots), dtype=np.float32)
        self.distinct = np.zeros(rows, dtype=np.int64)
        self._frequency = np.zeros(rows, dtype=np.float32)
        self._presence = np.zeros(rows, dtype=np.float32)
        self.repetition = np.ones(rows, dtype=np.float32)
        # A hash table from tokens to slots, with open addressing; never more than half full.
        self._index = np.full((rows, 2 * slots), _EMPTY, dtype=np.int32)


@numba.njit(cache=True, nogil=True)
def _find(index, tokens, token):
    """Where one row's hash table has `token`, or would have it."""
    last = len(index) - 1
    at = ((token * 2654435761) >> 16) & last
    while index[at] >= 0 and tokens[index[at]] != token:
        at = (at + 1) & last
    return at


@numba.njit(cache=True, nogil=True)
def _index_all(index, tokens, distinct):
    for row in range(len(tokens)):
        for slot in range(distinct[row]):
            index[row, _find(index[row], tokens[row], tokens[row, slot])] = slot


@numba.njit(cache=True, nogil=True)
def _additive(frequency_sum, presence):
    # Both are subtracted from a zero, the frequency's first or last: the bits are the same.
    return (np.float32(0) - frequency_sum) - presence


@numba.njit(cache=True, nogil=True)
def _count(
    index, tokens, sums, distinct, frequency, presence, rows, ends, new, vocab_size,
    places, changed, additive,
):  # fmt: skip
    n = 0
    for i in range(len(rows)):
        row = rows[i]
        first = n
        for j in range(ends[i - 1] if i else 0, ends[i]):
            token = new[j]
            if token < 0 or token >= vocab_size:
                continue
            at = _find(index[row], tokens[row], token)
            slot = index[row, at]
            if slot < 0:
                slot = distinct[row]
                distinct[row] += 1
                index[row, at] = slot
                tokens[row, slot] = token
                sums[row, slot] = 0
            sums[row, slot] += frequency[row]
            places[n] = row * tokens.shape[1] + slot
            changed[n] = token
            n += 1
        # Behind the last count, so that a place that is there twice has one value.
        for k in range(first, n):
            slot = places[k] - row * tokens.shape[1]
            additive[k] = _additive(sums[row, slot], presence[row])
    return n


@numba.njit(cache=True, nogil=True)
def _along_paths(
    index, tokens, sums, frequency, presence, repetition, rows, at, tree_tokens, parents, sizes,
    vocab_size, nodes, path_tokens, additive, scaling,
):  # fmt: skip
    width = tree_tokens.shape[1]
    path = np.empty(width, dtype=np.int64)
    n = 0
    for i in range(len(rows)):
        row, b = rows[i], at[i]
        for node in range(1, sizes[b]):
            depth = 0
            step = node
            while step > 0:
                path[depth] = tree_tokens[b, step]
                depth += 1
                step = parents[b, step]
            for j in range(depth):
                token = path[j]
                if token < 0 or token >= vocab_size or _occurrences(path, token, 0, j):
                    continue
                slot = index[row, _find(index[row], tokens[row], token)]
                total = sums[row, slot] if slot >= 0 else np.float32(0)
                for _ in range(_occurrences(path, token, j, depth)):
                    total += frequency[row]
                nodes[n] = b * width + node
                path_tokens[n] = token
                additive[n] = _additive(total, presence[row])
                scaling[n] = repetition[row]
                n += 1
    return n


@numba.njit(cache=True, nogil=True)
def _occurrences(path, token, begin, end):
    n = 0
    for i in range(begin, end):
        if path[i] == token:
            n += 1
    return n
