"""Threads that help the calling thread through one compiled call, and their working memory."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

import numpy as np
from numba import njit, types

from . import columns as col
from .bigrams import MOST_FOLLOWERS
from .config import RetrievalConfig
from .draft_tree import NODE_COLUMNS, WEIGHT_COLUMNS
from .pointers import atomic_add
from .search import SEARCH_COLUMNS, search_rows


class Workspace:
    """Arrays that one thread reuses from call to call; they grow and never shrink."""

    def __init__(self) -> None:
        self._limits: tuple[int, ...] = ()
        self._segments = -1
        self._arrays: tuple[np.ndarray, ...] = ()
        self._table = np.empty(0, np.int64)

    def fit(self, config: RetrievalConfig, segments: int) -> np.ndarray:
        """int64[WORKSPACE_COLUMNS]: addresses of arrays large enough for so many sub-indices.

        In the order of columns.py and of _arrays(), last the slots of the hash table.
        """
        limits = (
            config.prefix_length,
            config.max_match_length,
            config.branch_length,
            config.max_samples,
            config.max_input_samples,
        )
        if limits != self._limits or segments > self._segments:
            self._limits, self._segments = limits, max(2 * segments, 8)
            self._arrays = _arrays(*limits, self._segments)
            slots = self._arrays[col.CHILDREN_AT].size
            self._table = np.array([*(a.ctypes.data for a in self._arrays), slots], np.int64)
        return self._table


def _arrays(
    prefix: int, longest: int, branch: int, samples: int, inputs: int, segments: int
) -> tuple[np.ndarray, ...]:
    capacity = 1 + (samples + inputs) * branch + MOST_FOLLOWERS
    slots = 1 << (2 * capacity - 1).bit_length()
    return (
        np.empty((capacity, NODE_COLUMNS), np.int32),
        np.empty((capacity, WEIGHT_COLUMNS), np.float64),
        np.zeros(slots + 1, np.uint64),
        np.empty(slots, np.int32),
        np.empty(capacity, np.float64),  # heap: probabilities
        np.empty(capacity, np.int64),  # and keys
        np.empty(capacity, np.int32),  # draft: tokens,
        np.empty(capacity, np.int32),  # parents,
        np.empty(capacity, np.float32),  # probabilities
        np.empty(capacity, np.int8),  # and sources
        np.empty(2 * inputs + (longest + 1) * (inputs + 1), np.int32),  # input occurrences
        np.empty((prefix, segments, col.INTERVAL_COLUMNS), np.int64),
        np.empty((search_rows(segments), SEARCH_COLUMNS), np.int64),
        np.empty((2, samples), np.int64),  # samples: sub-indices and positions
    )


class Helper:
    """A thread that waits, without the GIL, for its mailbox to name work, and takes part in it.

    Were the GIL needed to begin, the thread that calls would wait for the helper whenever the
    system interrupts the helper at that moment.
    """

    def __init__(self, run: Callable[[int], object]) -> None:
        """run: compiled; gets the mailbox's address and never returns."""
        self._mailbox = np.zeros(MAILBOX_SIZE, np.int64)
        self.address = int(self._mailbox.ctypes.data)
        self._workspace = Workspace()
        self._kept: object = None
        initialise_mailbox(self.address)
        threading.Thread(target=self._run, args=(run,), name="retrieval", daemon=True).start()

    def _run(self, run: Callable[[int], object]) -> None:
        # It must not take its caller's core when it is woken up: it helps if another is free.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        run(self.address)

    def prepare(self, config: RetrievalConfig, segments: int, kept: object) -> bool:
        """Whether it is idle; then it is ready for a call, and keeps what the call reads alive."""
        if self._mailbox[MAILBOX_CALL] != 0:
            return False
        table = self._workspace.fit(config, segments)
        self._mailbox[MAILBOX_WORKSPACE] = table.ctypes.data
        self._kept = kept
        return True


class HelperPool:
    """A few helpers; one call at a time uses them, others meanwhile do without."""

    def __init__(self, size: int, run: Callable[[int], object]) -> None:
        self._free = threading.Lock()
        self.helpers = [Helper(run) for _ in range(size)]

    @contextlib.contextmanager
    def ready(
        self, most: int, config: RetrievalConfig, segments: int, kept: object
    ) -> Iterator[list[int]]:
        """Mailboxes of at most so many helpers, none if another call uses them."""
        if not self._free.acquire(blocking=False):
            yield []
            return
        try:
            helpers = self.helpers[:most]
            yield [h.address for h in helpers if h.prepare(config, segments, kept)]
        finally:
            self._free.release()


_thread = threading.local()
_pools: dict[Callable[[int], object], HelperPool] = {}
_pools_lock = threading.Lock()


def own_workspace() -> Workspace:
    """The calling thread's."""
    try:
        return _thread.workspace
    except AttributeError:
        _thread.workspace = Workspace()
        return _thread.workspace


def default_threads() -> int:
    """Threads that retrieval uses unless told otherwise: the process's cores, at most 4."""
    return min(4, len(os.sched_getaffinity(0)))


def shared_pool(size: int, run: Callable[[int], object]) -> HelperPool:
    """The process's helpers that run this, at least so many."""
    pool = _pools.get(run)
    if pool is None or len(pool.helpers) < size:
        with _pools_lock:
            pool = _pools.get(run)
            if pool is None:
                pool = _pools[run] = HelperPool(size, run)
            pool.helpers += [Helper(run) for _ in range(size - len(pool.helpers))]
    return pool


def _forget_pools() -> None:
    """A forked child has none of its parent's threads, and locks in any state."""
    global _pools, _pools_lock
    _pools, _pools_lock = {}, threading.Lock()


os.register_at_fork(after_in_child=_forget_pools)


# -- compiled ------------------------------------------------------------------------------

# A mailbox: the address of the call to take part in (0: idle), that of the helper's workspace
# table, and from the third word on a POSIX semaphore (at most 32 bytes on 64-bit Linux), posted
# when there is a call.
MAILBOX_CALL, MAILBOX_WORKSPACE, _SEMAPHORE = range(3)
MAILBOX_SIZE = 16
_sem_init = types.ExternalFunction("sem_init", types.intc(types.intp, types.intc, types.uintc))
_sem_post = types.ExternalFunction("sem_post", types.intc(types.intp))
_sem_wait = types.ExternalFunction("sem_wait", types.intc(types.intp))


@njit(cache=True)
def initialise_mailbox(mailbox_at):
    _sem_init(mailbox_at + 8 * _SEMAPHORE, 0, 0)


@njit(cache=True, nogil=True)
def post_call(mailbox_at, call_at):
    """Gives a call to an idle helper."""
    atomic_add(mailbox_at, call_at)
    _sem_post(mailbox_at + 8 * _SEMAPHORE)


@njit(cache=True, nogil=True)
def wait_for_call(mailbox_at):
    """The address of the next call."""
    call_at = np.int64(0)
    while call_at == 0:
        _sem_wait(mailbox_at + 8 * _SEMAPHORE)
        call_at = atomic_add(mailbox_at, 0)
    return call_at


@njit(cache=True, nogil=True)
def end_call(mailbox_at, call_at):
    """Says that the helper is idle again, and reads nothing of the call any more."""
    atomic_add(mailbox_at, -call_at)
