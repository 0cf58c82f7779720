"""Served outputs that survive: logged and searchable at once (logs.py), folded into files later.

In a fleet this is the process that holds LOCK: it follows the logs of the other servers
(followed_logs.py) and folds them too. The others: following.py.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .config import DatastoreError, DeletionPending
from .folder import Folder
from .folding import FoldWorker
from .followed_logs import FollowedLogs, joined
from .live import count_taken, hides, segment_limit
from .log_names import epoch_of, first_number
from .logs import LogOptions, LogSet
from .merging import Merger
from .segment import Segment
from .upkeep import Purge, Upkeep
from .wal import Deletion

logger = logging.getLogger(__name__)

# After a failure the background work is tried again so soon, then twice as late each time.
_RETRY_SECONDS = 1.0
_LONGEST_RETRY_SECONDS = 60.0
DELETION_SECONDS = 50.0
# How often the other servers of a fleet are looked at.
POLL_SECONDS = 0.25
_COMPLAINT_SECONDS = 60.0


@dataclass(frozen=True)
class DurableOptions:
    """How served outputs are kept; times in seconds."""

    max_tokens: int
    """Tokens in files; beyond them the oldest file is dropped whole."""
    logs: LogOptions
    """How they are taken in."""
    fold_tokens: int = 1 << 20
    """A log of so many tokens becomes a sub-index file."""
    fold_interval: float = 300.0
    """So does an older one."""


class DurableCollection:
    """Documents by namespace, in a folder. Thread-safe. Deletions return when they are through."""

    def __init__(
        self,
        folder: Folder,
        options: DurableOptions,
        on_change: Callable[[], None],
        shared: bool = False,
    ) -> None:
        """shared: other servers may join; the manifest says so from now on.

        Raises DatastoreError: a log cannot be read or is another datastore's, or a new one, or the
        manifest, cannot be written.
        """
        self._folder = folder
        self._options = options
        self._on_change = on_change
        if shared:
            _admit_members(folder)
        segment_tokens = segment_limit(options.max_tokens)
        self._followed = FollowedLogs(
            folder, options.logs, segment_tokens, on_change, lambda log: log.member is not None
        )
        self._followed.look(list)
        self._logs = LogSet(
            folder,
            options.logs,
            segment_tokens,
            on_change,
            next_number=first_number(self._followed.epoch),
        )
        for deletion in self._logs.deletions:
            self._followed.delete(deletion)
        self._purges = [Purge(deletion) for deletion in self._logs.deletions]
        self._work = threading.Condition()  # for what follows, and for _purges
        self._fold_wanted = False
        self._fold_error: str | None = None
        self._nudges = 0  # those who wait for something, so that it is tried at once
        self._failures = 0
        self._background_error: str | None = None
        self._closed = False
        self._waits_for_members = False  # a purge does: nothing is tried before the next look
        self._foldable = False  # whether a member's log is
        self._closing = threading.Event()
        self._note_deletions()
        if not folder.read_only:
            self._start_upkeep(segment_tokens)

    def _start_upkeep(self, segment_tokens: int) -> None:
        """Begins the work in the background."""
        folder = self._folder
        self._worker = FoldWorker()
        self._merger = Merger(folder, segment_tokens)
        self._upkeep = Upkeep(
            folder, segment_tokens, self._options.max_tokens, self._logs, self._followed,
            self._worker, self._merger, self._on_change,
        )  # fmt: skip
        threads = {"datastore-fold": self._run}
        if folder.manifest.members is not None:
            threads["datastore-follow"] = self._run_looks
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True) for name, run in threads.items()
        ]
        for thread in self._threads:
            thread.start()
        self._merger.wake()

    # -- ingest ----------------------------------------------------------------------------

    def add(self, namespace: str, tokens: np.ndarray, digest: bytes) -> bool:
        """As LogSet.add()."""
        taken = self._logs.add(namespace, tokens, digest)
        if self._logs.current.tokens >= self._options.fold_tokens:
            self._wake()
        return taken

    def flush(self, timeout: float | None) -> None:
        """Waits until all that was added before is searchable, or raises TimeoutError."""
        self._logs.flush(timeout)
        if self._folder.manifest.members is not None and not self._folder.read_only:
            self._look()
            self._followed.flush(timeout)

    def fold(self, timeout: float | None) -> None:
        """Waits until all that was added here before is in files, and these are merged.

        So are the logs of members that have ended.

        Raises TimeoutError, or DatastoreError if a file cannot be written.
        """
        if self._folder.read_only or self._closed:
            raise DatastoreError(f"datastore {self._folder.path} is not open for writing")
        goal = self._logs.current.name.number
        self._look()
        sealed = {log.name for log in self._followed.sealed()}

        def is_done() -> bool:
            if self._folder.manifest.first_log <= goal:
                return False
            # A log with a deletion may have to wait for a server that stands still.
            waits = any(purge.waits_for for purge in self._purges)
            return waits or not any(log.name in sealed for log in self._followed.logs)

        with self._work:
            self._fold_wanted = True
            self._foldable = bool(sealed)
            self._fold_error = None
            self._nudges += 1
            self._work.notify_all()
            done = self._work.wait_for(
                lambda: self._closed or self._fold_error or is_done(),
                timeout,
            )
            if self._fold_error is not None:
                raise DatastoreError(self._fold_error)
            if not done:
                raise TimeoutError(f"the log was not folded after {timeout} s")
        self._merger.wait_idle(timeout)

    # -- reading ---------------------------------------------------------------------------

    def segments_of(self, namespace: str) -> tuple[Segment, ...]:
        """What is searchable of a namespace, oldest first."""
        # The logs are read first: a document that moves from a log to a file meanwhile is then
        # seen twice for a moment rather than not at all.
        fresh = [*self._followed.segments_of(namespace), *self._logs.segments_of(namespace)]
        hidden = [p.deletion for p in list(self._purges) if p.deletion.concerns(namespace)]
        folded = [s for f in self._folder.live_files for s in f.by_owner.get(namespace, ())]
        return (*(s for s in folded if not hides(hidden, s)), *fresh)

    def namespaces(self) -> dict[str, int]:
        """Tokens by namespace."""
        found = {name: self.segments_of(name) for name in self._owners()}
        return {name: sum(s.num_tokens for s in group) for name, group in found.items() if group}

    def _owners(self) -> list[str]:
        names = [name for log in self._followed.logs for name in log.segments]
        names += [name for log in self._logs.logs for name in log.segments]
        names += [name for file in self._folder.live_files for name in file.by_owner]
        return list(dict.fromkeys(names))

    def counters(self) -> dict[str, float]:
        """queued_documents, queued_tokens, ingest_lag, unfolded_tokens, evicted_tokens,
        pending_deletions, background_failures, folded_logs."""
        upkeep = None if self._folder.read_only else self._upkeep
        return {
            **joined(self._logs.counters(), self._followed.counters()),
            "evicted_tokens": upkeep.evicted_tokens if upkeep else 0,
            "folded_logs": upkeep.folded_logs if upkeep else 0,
            "pending_deletions": len(self._purges),
            "background_failures": self._failures,
        }

    @property
    def background_error(self) -> str | None:
        """What the last attempt to write files failed with; None: it did not."""
        return self._background_error or self._logs.sync_error

    # -- deletion --------------------------------------------------------------------------

    def delete(
        self,
        namespace: str | None,
        digest: bytes | None,
        timeout: float | None = DELETION_SECONDS,
    ) -> int:
        """Removes documents from memory and from all files; returns their tokens.

        Searches do not find them from the start; on return no file has them either. Raises
        DatastoreError if it cannot be logged, and nothing is deleted; DeletionPending if a file
        cannot be rewritten, or not within `timeout` seconds: then it goes on until it is through,
        also after a restart.
        """
        with contextlib.suppress(TimeoutError):  # what is still queued is taken out of the queue
            self.flush(timeout)
        removed = 0
        purges: list[Purge] = []

        def hide(deletion: Deletion) -> None:
            nonlocal removed
            removed = self._count(deletion)
            purges.append(Purge(deletion))
            with self._work:
                self._purges = [*self._purges, *purges]

        self._followed.delete(self._logs.delete(namespace, digest, hide))
        self._on_change()
        with self._work:
            self._nudges += 1
            self._work.notify_all()
        (purge,) = purges
        if not purge.done.wait(timeout):
            reason = f", for it waits for {purge.waits_for}" if purge.waits_for else ""
            purge.error = f"it takes more than {timeout} s{reason}"
        if purge.error is not None:
            raise DeletionPending(
                f"deleted from memory, but not from all files yet: {purge.error}. It is tried "
                "again until it is through, also after a restart; delete again to know when"
            )
        return removed

    def _count(self, deletion: Deletion) -> int:
        """Tokens of the documents that it takes."""
        owners = filter(deletion.concerns, self._owners())
        return sum(count_taken(deletion, self.segments_of(owner)) for owner in owners)

    # -- the other servers of a fleet ------------------------------------------------------

    def _run_looks(self) -> None:
        complained = -_COMPLAINT_SECONDS
        while not self._closing.wait(POLL_SECONDS):
            try:
                self._look()
                self._foldable = bool(self._followed.sealed())
            except Exception as error:  # whatever it is: the thread must go on
                now = time.monotonic()
                if now - complained >= _COMPLAINT_SECONDS:
                    complained = now
                    logger.error("The datastore's other servers cannot be followed: %s", error)
            self._waits_for_members = False
            self._wake()

    def _look(self) -> None:
        """Takes in what the others have logged; their deletions are this process's work now."""
        try:
            self._followed.look(lambda: [purge.deletion for purge in self._purges])
        finally:
            self._note_deletions()

    def _note_deletions(self) -> None:
        with self._work:
            # In this order: what is through leaves the followed logs first.
            known = {purge.deletion for purge in self._purges}
            new = list(dict.fromkeys(d for d in self._followed.deletions if d not in known))
            if new:
                self._purges = [*self._purges, *(Purge(d, of_member=True) for d in new)]
        self._logs.follow(new, self._followed.epoch)
        if new:
            self._on_change()

    # -- the background thread -------------------------------------------------------------

    def _wake(self) -> None:
        with self._work:
            self._work.notify_all()

    def _run(self) -> None:
        retry = _RETRY_SECONDS
        while True:
            with self._work:
                self._work.wait_for(self._has_work, 1.0)
                if self._closed:
                    return
            try:
                self._step()
                retry = _RETRY_SECONDS
                self._background_error = None
            except Exception as error:  # whatever it is: the thread must see it through one day
                with self._work:
                    if self._closed:
                        return
                    self._note_failure(error)
                    # Who comes now is told by another attempt, not by one long past.
                    nudges = self._nudges
                    self._work.wait_for(lambda: self._closed or self._nudges != nudges, retry)  # noqa: B023
                    retry = min(2 * retry, _LONGEST_RETRY_SECONDS)

    def _note_failure(self, error: Exception) -> None:
        reason = describe(error)
        if isinstance(error, DatastoreError | OSError):
            logger.error("The datastore's files could not be written: %s", reason)
        else:
            logger.exception("The datastore's files could not be written")
        self._failures += 1
        self._fold_error = self._background_error = reason
        for purge in self._purges:
            purge.error = reason
            purge.done.set()
        self._work.notify_all()

    def _has_work(self) -> bool:
        purges = self._purges and not self._waits_for_members
        waiting = not self._purges and (len(self._logs.logs) > 1 or self._foldable)
        return bool(self._closed or purges or waiting or self._must_rotate())

    def _must_rotate(self) -> bool:
        log, options = self._logs.current, self._options
        return (
            self._fold_wanted
            or log.suspect
            or log.is_due(options.fold_tokens, options.fold_interval)
        )

    def _step(self) -> None:
        if self._must_rotate():
            self._fold_wanted = False
            self._logs.rotate()
        if self._purges:
            self._purge()
        elif len(self._logs.logs) > 1:
            self._upkeep.fold(self._upkeep.own_sealed()[:1])
        else:
            self._fold_members()
        self._upkeep.evict()
        self._merger.wake()
        self._wake()

    def _fold_members(self) -> None:
        """Turns a member's log into a file that nobody writes to any more."""
        sealed = self._followed.sealed()
        self._look()  # to their ends: a deletion in one goes before it
        self._foldable = len(sealed) > 1
        if sealed and not self._purges:
            self._upkeep.fold(sealed[:1])

    def _purge(self) -> None:
        """Has every file follow the deletions that stand in logs that are sealed now."""
        sealed = self._followed.sealed()
        self._look()  # to their ends: what they delete is followed before they are folded
        newest = max(purge.deletion.number for purge in self._purges)
        if self._logs.current.first_number < newest:
            self._logs.rotate()  # what they take may be in the log that is being written
        first = self._logs.current.first_number
        batch = [purge for purge in self._purges if purge.deletion.number <= first]
        if not self._upkeep.purge(batch, sealed):
            self._waits_for_members = True
            return
        with self._work:
            self._purges = [other for other in self._purges if other not in batch]
        self._on_change()
        for purge in batch:
            purge.error = None
            purge.done.set()

    def close(self) -> None:
        """Ends all threads; what was added is searchable, and in the logs."""
        if self._folder.read_only or self._closed:
            return
        with self._work:
            self._closed = True
            self._work.notify_all()
        self._closing.set()
        self._worker.close()
        self._merger.close()
        for thread in self._threads:
            thread.join()
        self._logs.close()
        self._followed.close()
        for purge in self._purges:
            purge.error = "the datastore was closed; it goes on when it is opened again"
            purge.done.set()


def _admit_members(folder: Folder) -> None:
    """Has the manifest say that other servers may take in beside this one."""
    if folder.manifest.members is None:
        # They count from an epoch on that no document and no deletion has so far.
        epoch = epoch_of(folder.manifest.next_number) + 1
        folder.publish(members={}, next_number=first_number(epoch))


def describe(error: Exception) -> str:
    """An error as a line for a person."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) if isinstance(error, DatastoreError) else f"{type(error).__name__}: {error}"
