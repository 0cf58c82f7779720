"""From the end of each request's tokens to a draft tree (SSSD, Algorithms 1-3).

Occurrences of the last P tokens are found in the input and in the datastore, their continuations
are folded into one tree that counts both sources apart, and the most probable nodes are taken
best first. Compiled, without the GIL, and without allocation: a batch is shared among a few
threads, each with arrays of its own that it reuses.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from . import columns as col
from .bigrams import Bigrams
from .config import DatastoreError, RetrievalConfig
from .draft_tree import SOURCE_BIGRAM, SOURCE_LIVE, SOURCE_PROMPT, SOURCE_SELF_OUTPUT, SOURCE_STATIC
from .input_trie import InputTrie
from .kernel import CALL_SIZE, help_forever, run_call
from .segment import Snapshot
from .suffix_array import token_dtype, tokens_per_key
from .workers import default_threads, own_workspace, shared_pool

__all__ = [
    "SOURCE_BIGRAM",
    "SOURCE_LIVE",
    "SOURCE_PROMPT",
    "SOURCE_SELF_OUTPUT",
    "SOURCE_STATIC",
    "Draft",
    "Drafts",
    "retrieve",
]

_MAX_NODES = 1 << 16
_NO_SEGMENTS = np.empty((0, col.SEGMENT_COLUMNS), np.int64)
_DEFAULT_CONFIG = RetrievalConfig()
_NOTHING_SUPPOSED = np.empty((0, 1), np.int32), np.empty(0, np.int64)
_NO_BIGRAMS = Bigrams(np.empty((0, 1), np.int32), np.empty((0, 1), np.float32))
# Fewer requests than this are not worth waking a thread for.
_SHARED_BATCH = 8


def _help_16_bit(mailbox_at: int) -> None:
    help_forever(mailbox_at, np.uint16(0))


def _help_32_bit(mailbox_at: int) -> None:
    help_forever(mailbox_at, np.uint32(0))


# By the tokens' size in bytes.
_HELP = {2: _help_16_bit, 4: _help_32_bit}


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
    """int8[n], where the node was seen: bits of Origin."""

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


@dataclass(frozen=True)
class Continuations:
    """What requests might go on with, in the order in which drafts are made for it.

    Attributes:
        whose: int64[n], index of the request.
        tokens: int32[n, most], token ids >= 0 from the left.
        lengths: int64[n], how many of a row count.
    """

    whose: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray

    @classmethod
    def one(cls, tokens: Sequence[int]) -> "Continuations":
        """What the first request might go on with."""
        ids = np.array([tokens], np.int32).reshape(1, -1)
        return cls(np.zeros(1, np.int64), ids, np.array([ids.size]))

    def __len__(self) -> int:
        return self.whose.size


def retrieve(
    tries: Sequence[InputTrie],
    snapshots: Snapshot | Sequence[Snapshot | None] | None,
    max_nodes: Sequence[int] | np.ndarray | int,
    config: RetrievalConfig | None = None,
    min_prob: float = 0.0,
    *,
    bigrams: Bigrams | None = None,
    threads: int | None = None,
) -> Drafts:
    """Draft trees for a batch of requests, each rooted at the last token its trie has seen.

    snapshots: what each request may read of the datastore, one for all or one (or None) per
    request. max_nodes: most nodes per draft without the root, one number or one per request (0:
    none). min_prob: nodes less probable than this are left out. bigrams: what shares the weight
    of tokens that were not seen after the root; None: nothing. threads: most threads, the
    calling one included; None: one per core, at most 4. A request that has seen nothing gets an
    empty draft. Raises DatastoreError if the arguments do not fit each other.
    """
    call = Call(tries, snapshots, max_nodes, config, bigrams, min_prob=min_prob)
    call.run(threads)
    return call.drafts


class Call:
    """What a compiled call reads and writes.

    Args:
        tries, snapshots, max_nodes, config, bigrams, min_prob: as `retrieve` takes them.
        continuations: what some of the requests are supposed to have gone on with
            (datastores.supposed); None: drafts are made for what they have seen. With it max_nodes
            is one number, and only one thread may run the call.

    Attributes:
        drafts: of each request, or of each continuation.
        state: int64, the call as kernel.py has it.
    """

    def __init__(
        self,
        tries: Sequence[InputTrie],
        snapshots: Snapshot | Sequence[Snapshot | None] | None,
        max_nodes: Sequence[int] | np.ndarray | int,
        config: RetrievalConfig | None = None,
        bigrams: Bigrams | None = None,
        *,
        min_prob: float = 0.0,
        continuations: Continuations | None = None,
    ) -> None:
        self._config = config or _DEFAULT_CONFIG
        self._bigrams = bigrams or _NO_BIGRAMS
        segments, shares, self._most_segments, self._separator = _segment_tables(
            snapshots, len(tries)
        )
        rows = np.empty((len(tries), col.TRIE_COLUMNS), np.int64)
        for i, trie in enumerate(tries):
            rows[i] = trie._row
        self._supposed = _NOTHING_SUPPOSED
        if continuations is not None:
            rows, shares = rows[continuations.whose], shares[continuations.whose]
            rows[:, col.SEEN_SIZE] += continuations.lengths
            self._supposed = continuations.tokens, continuations.lengths
        budgets, self._width = _budgets(max_nodes, len(rows))
        self.drafts = _empty_drafts(len(rows), self._width)
        self.state = np.zeros(CALL_SIZE + len(rows), np.int64)
        self._arrays = rows, segments, shares, budgets, np.array([min_prob], np.float64)
        # What the tables name must still be there when it is read.
        self._kept = snapshots, [trie._arrays for trie in tries]

    def run(self, threads: int | None, stop_at: int = 0) -> None:
        """Make the drafts.

        Args:
            threads: as `retrieve` takes it.
            stop_at: address of a Stop's words; 0: all drafts are made.
        """
        batch = len(self.drafts)
        if not batch or not self._width:
            return
        zero = token_dtype(self._separator)(0)
        bits, per_key = tokens_per_key(self._separator)
        config, table = self._config, self._bigrams
        most = default_threads() if threads is None else threads
        most = min(most, batch // (_SHARED_BATCH // 2)) - 1
        with self._helpers(most, zero.itemsize) as mailboxes:
            done = False
            while not done:
                done = run_call(
                    self.state, *self._arrays, self._separator, bits, per_key, zero,
                    config.limits, config.weights, config.length_weights, config.novelty,
                    table.tokens, table.probs,
                    self.drafts.tokens, self.drafts.parents, self.drafts.probs,
                    self.drafts.sources, self.drafts.sizes,
                    own_workspace().fit(config, self._most_segments),
                    np.array(mailboxes, np.int64), *self._supposed, stop_at,
                )  # fmt: skip

    def _helpers(self, most: int, itemsize: int) -> contextlib.AbstractContextManager[list[int]]:
        """Mailboxes of at most so many helpers, for tokens of so many bytes."""
        if most <= 0:
            return contextlib.nullcontext([])
        # A helper may be interrupted and end after the call: it keeps what it reads.
        pool = shared_pool(most, _HELP[itemsize])
        return pool.ready(most, self._config, self._most_segments, self)


def _empty_drafts(batch: int, width: int) -> Drafts:
    return Drafts(
        np.empty((batch, width), np.int32),
        np.empty((batch, width), np.int32),
        np.empty((batch, width), np.float32),
        np.empty((batch, width), np.int8),
        np.zeros(batch, np.int64),
    )


def _budgets(max_nodes: Sequence[int] | np.ndarray | int, batch: int) -> tuple[np.ndarray, int]:
    """int64[batch] and the largest of them."""
    if isinstance(max_nodes, int) and 0 <= max_nodes <= _MAX_NODES:
        return np.full(batch, max_nodes, np.int64), max_nodes if batch else 0
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
    shares = np.zeros((batch, col.SHARE_COLUMNS), np.int64)
    if isinstance(snapshots, Snapshot):
        rows = len(snapshots.table)
        shares[:, col.SEGMENTS] = rows
        return snapshots.table, shares, rows, snapshots.separator
    if snapshots is not None and len(snapshots) != batch:
        raise DatastoreError(
            f"snapshots must be one for all requests or one per request ({batch}), "
            f"got {len(snapshots)}"
        )
    given = [snapshot for snapshot in snapshots or () if snapshot is not None]
    if not given:
        return _NO_SEGMENTS, shares, 0, 0
    if len(given) == batch and all(snapshot is given[0] for snapshot in given):
        return _segment_tables(given[0], batch)
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
