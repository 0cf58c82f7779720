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
from .input_trie import InputTrie, SupposedInput
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


def retrieve(
    tries: Sequence[InputTrie | SupposedInput],
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
    config = config or _DEFAULT_CONFIG
    batch = len(tries)
    budgets, width = _budgets(max_nodes, batch)
    drafts = _empty_drafts(batch, width)
    if batch and width > 0:
        table, least = bigrams or _NO_BIGRAMS, np.array([min_prob], np.float64)
        _fill(drafts, tries, snapshots, budgets, config, least, table, threads)
    return drafts


def _empty_drafts(batch: int, width: int) -> Drafts:
    return Drafts(
        np.empty((batch, width), np.int32),
        np.empty((batch, width), np.int32),
        np.empty((batch, width), np.float32),
        np.empty((batch, width), np.int8),
        np.zeros(batch, np.int64),
    )


def _fill(
    drafts: Drafts,
    tries: Sequence[InputTrie | SupposedInput],
    snapshots: Snapshot | Sequence[Snapshot | None] | None,
    budgets: np.ndarray,
    config: RetrievalConfig,
    min_prob: np.ndarray,
    table: Bigrams,
    threads: int | None,
) -> None:
    """Makes the drafts, in the compiled call. budgets: int64[batch]. min_prob: float64[1]."""
    batch = len(tries)
    segments, shares, most_segments, separator = _segment_tables(snapshots, batch)
    zero = token_dtype(separator)(0)
    bits, per_key = tokens_per_key(separator)
    rows = np.empty((batch, col.TRIE_COLUMNS), np.int64)
    for i, trie in enumerate(tries):
        rows[i] = trie._row
    call = np.zeros(CALL_SIZE + batch, np.int64)
    arrays = (rows, segments, shares, budgets, min_prob)
    # A helper may be interrupted and end after the call: what it reads must still be there.
    kept = (call, arrays, config, drafts, snapshots, [trie._searched for trie in tries], table)
    most = default_threads() if threads is None else threads
    most = min(most, batch // (_SHARED_BATCH // 2)) - 1
    with contextlib.ExitStack() as stack:
        mailboxes: list[int] = []
        if most > 0:
            pool = shared_pool(most, _HELP[zero.itemsize])
            mailboxes = stack.enter_context(pool.ready(most, config, most_segments, kept))
        done = False
        while not done:
            done = run_call(
                call, *arrays, separator, bits, per_key, zero,
                config.limits, config.weights, config.length_weights, config.novelty,
                table.tokens, table.probs,
                drafts.tokens, drafts.parents, drafts.probs, drafts.sources, drafts.sizes,
                own_workspace().fit(config, most_segments), np.array(mailboxes, np.int64),
            )  # fmt: skip


def _budgets(max_nodes: Sequence[int] | np.ndarray | int, batch: int) -> tuple[np.ndarray, int]:
    """int64[batch] and the largest of them."""
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
