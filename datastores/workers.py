"""Threads that help the calling thread through one compiled call, and their working memory."""

import logging
import os
import threading
import time
from typing import Protocol

import numpy as np

from .config import RetrievalConfig
from .draft_tree import NODE_COLUMNS, WEIGHT_COLUMNS
from .search import SEARCH_COLUMNS, search_rows

logger = logging.getLogger(__name__)


class Workspace:
    """Arrays that one thread reuses from call to call; they grow and never shrink."""

    def __init__(self) -> None:
        self._limits: tuple[int, ...] = ()
        self._segments = -1
        self._arrays: tuple[np.ndarray, ...] = ()
        self._table = np.empty(0, np.int64)

    def fit(self, config: RetrievalConfig, segments: int) -> np.ndarray:
        """int64[15]: addresses of arrays large enough for these limits and so many sub-indices.

        In the order of _arrays(), last the slots of the hash table.
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
            slots = self._arrays[3].size
            self._table = np.array([*(a.ctypes.data for a in self._arrays), slots], np.int64)
        return self._table


def _arrays(
    prefix: int, longest: int, branch: int, samples: int, inputs: int, segments: int
) -> tuple[np.ndarray, ...]:
    capacity = 1 + (samples + inputs) * branch
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
        np.empty((prefix, segments, 2), np.int64),  # intervals
        np.empty((search_rows(segments), SEARCH_COLUMNS), np.int64),
        np.empty((2, samples), np.int64),  # samples: sub-indices and positions
    )


class Work(Protocol):
    """What a pool runs: one call per thread, each with a workspace of its own."""

    def __call__(self, workspace: Workspace, helps: bool) -> bool: ...


class WorkerPool:
    """A few threads that sleep until there is work for all; one job at a time."""

    def __init__(self, size: int) -> None:
        self._free = threading.Lock()
        self._workers = [_Worker() for _ in range(size)]

    def call(self, work: Work, helpers: int) -> None:
        """Runs `work` here and in `helpers` more threads, as they get round to it.

        The calls share the work among themselves; here work() returns True once all of it is
        done, and nobody waits for helpers that are late or interrupted. If another thread has
        the helpers, this one works alone.
        """
        if helpers and self._free.acquire(blocking=False):
            try:
                for worker in self._workers[:helpers]:
                    worker.wake(work)
                done = work(own_workspace(), False)
            finally:
                self._free.release()
        else:
            done = work(own_workspace(), False)
        while not done:  # a helper was interrupted while it put its result in place
            time.sleep(20e-6)
            done = work(own_workspace(), False)


class _Worker:
    def __init__(self) -> None:
        self._work: Work | None = None
        self._asleep = threading.Lock()
        self._asleep.acquire()
        threading.Thread(target=self._run, name="retrieval", daemon=True).start()

    def wake(self, work: Work) -> None:
        """Only one thread at a time may call this."""
        self._work = work
        if self._asleep.locked():  # else it has not yet taken up the last call
            self._asleep.release()

    def _run(self) -> None:
        workspace = Workspace()
        while True:
            self._asleep.acquire()
            work, self._work = self._work, None
            if work is not None:
                try:
                    work(workspace, True)
                except Exception:  # nothing was taken up: compiled code raises none
                    logger.exception("A retrieval thread failed; the others do its work")
                del work  # what it holds on to may go


_thread = threading.local()
_pool: WorkerPool | None = None
_pool_lock = threading.Lock()


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


def shared_pool(helpers: int) -> WorkerPool:
    """The process's pool, made or enlarged to have at least so many threads."""
    global _pool
    pool = _pool
    if pool is None or len(pool._workers) < helpers:
        with _pool_lock:
            if _pool is None or len(_pool._workers) < helpers:
                _pool = WorkerPool(helpers)
            pool = _pool
    return pool


def _forget_pool() -> None:
    """A forked child has none of its parent's threads, and locks in any state."""
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_pool)
