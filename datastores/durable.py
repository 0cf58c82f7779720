"""Served outputs that survive: logged and searchable at once (logs.py), folded into files later."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .config import DatastoreError, DeletionPending
from .folder import Folder, SubIndexFile
from .folding import FoldJob, FoldWorker
from .live import count_taken, hides, segment_limit
from .logs import LogOptions, LogSet
from .manifest import FileEntry
from .merging import Merger
from .segment import Segment
from .wal import Deletion

logger = logging.getLogger(__name__)

# After a failure the background work is tried again so soon, then twice as late each time.
_RETRY_SECONDS = 1.0
_LONGEST_RETRY_SECONDS = 60.0
DELETION_SECONDS = 50.0
# What a segment costs beside its tokens, in tokens: namespaces are not free.
_SEGMENT_COST = 64


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


@dataclass(eq=False)
class _Purge:
    """A deletion that files have not followed yet."""

    deletion: Deletion
    done: threading.Event = field(default_factory=threading.Event)
    error: str | None = None


class DurableCollection:
    """Documents by namespace, in a folder. Thread-safe. Deletions return when they are through."""

    def __init__(
        self, folder: Folder, options: DurableOptions, on_change: Callable[[], None]
    ) -> None:
        self._folder = folder
        self._options = options
        self._on_change = on_change
        self._segment_tokens = segment_limit(options.max_tokens)
        self._evicted_tokens = 0
        self._logs = LogSet(folder, options.logs, self._segment_tokens, on_change)
        self._purges = [_Purge(deletion) for deletion in self._logs.deletions]
        self._work = threading.Condition()  # for what follows, and for _purges
        self._fold_wanted = False
        self._fold_error: str | None = None
        self._nudges = 0  # those who wait for something, so that it is tried at once
        self._failures = 0
        self._background_error: str | None = None
        self._closed = False
        if folder.read_only:
            return
        self._worker = FoldWorker()
        self._merger = Merger(folder, self._segment_tokens)
        self._thread = threading.Thread(target=self._run, name="datastore-fold", daemon=True)
        self._thread.start()
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

    def fold(self, timeout: float | None) -> None:
        """Waits until all that was added before is in files, and these are merged.

        Raises TimeoutError, or DatastoreError if a file cannot be written.
        """
        if self._folder.read_only or self._closed:
            raise DatastoreError(f"datastore {self._folder.path} is not open for writing")
        goal = self._logs.current.number
        with self._work:
            self._fold_wanted = True
            self._fold_error = None
            self._nudges += 1
            self._work.notify_all()
            done = self._work.wait_for(
                lambda: self._closed or self._fold_error or self._folder.manifest.first_log > goal,
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
        fresh = self._logs.segments_of(namespace)
        hidden = [p.deletion for p in list(self._purges) if p.deletion.concerns(namespace)]
        folded = [s for f in self._folder.live_files for s in f.by_owner.get(namespace, ())]
        return (*(s for s in folded if not hides(hidden, s)), *fresh)

    def namespaces(self) -> dict[str, int]:
        """Tokens by namespace."""
        found = {name: self.segments_of(name) for name in self._owners()}
        return {name: sum(s.num_tokens for s in group) for name, group in found.items() if group}

    def _owners(self) -> list[str]:
        names = [name for log in self._logs.logs for name in log.segments]
        names += [name for file in self._folder.live_files for name in file.by_owner]
        return list(dict.fromkeys(names))

    def counters(self) -> dict[str, float]:
        """queued_documents, queued_tokens, ingest_lag, unfolded_tokens, evicted_tokens,
        pending_deletions, background_failures."""
        return {
            **self._logs.counters(),
            "evicted_tokens": self._evicted_tokens,
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
        purges: list[_Purge] = []

        def hide(deletion: Deletion) -> None:
            nonlocal removed
            removed = self._count(deletion)
            purges.append(_Purge(deletion))
            with self._work:
                self._purges = [*self._purges, *purges]

        self._logs.delete(namespace, digest, hide)
        self._on_change()
        with self._work:
            self._nudges += 1
            self._work.notify_all()
        (purge,) = purges
        if not purge.done.wait(timeout):
            purge.error = f"it takes more than {timeout} s"
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
        waiting = len(self._logs.logs) > 1
        return bool(self._closed or self._purges or waiting or self._must_rotate())

    def _must_rotate(self) -> bool:
        log, options = self._logs.current, self._options
        age = time.monotonic() - log.began
        return (
            self._fold_wanted
            or log.suspect
            or (
                log.tokens > 0
                and (log.tokens >= options.fold_tokens or age >= options.fold_interval)
            )
        )

    def _step(self) -> None:
        if self._must_rotate():
            self._fold_wanted = False
            self._logs.rotate()
        if self._purges:
            self._purge(self._purges[0])
        elif len(self._logs.logs) > 1:
            self._fold_oldest()
        self._evict()
        self._merger.wake()
        self._wake()

    def _fold_oldest(self) -> None:
        """Turns the oldest log into a file."""
        log, folder = self._logs.logs[0], self._folder
        log.live.flush(None)  # its thread must not be publishing when it is dropped
        if log.suspect:
            self._logs.write_anew(log)
        name = folder.new_file_name()
        # A deletion stands in the log that was written when it came, its documents in an earlier.
        deletions = tuple(purge.deletion for purge in self._purges)
        inputs = {"logs": (self._logs.path(log),), "deletions": deletions}
        tokens = self._run_job(name, **inputs) if log.tokens else 0
        add = [FileEntry(name, tokens)] if tokens else []
        next_number = self._logs.next_number
        folder.publish(add=add, first_log=log.number + 1, next_number=next_number)
        self._logs.forget(log)
        self._on_change()
        if tokens:
            logger.info("Log %d folded into a sub-index of %d tokens", log.number, tokens)

    def _purge(self, purge: _Purge) -> None:
        """Rewrites every file that the deletion concerns, then folds the logs that it may."""
        folder, deletion = self._folder, purge.deletion
        self._logs.rotate()  # what it takes may be in the log that is being written
        with self._merger.paused():
            for file in folder.live_files:
                if file.problem is not None:  # unreadable: whether it is concerned, none can say
                    folder.publish(remove=[file])
                elif _concerns(deletion, file):
                    self._rewrite(file, deletion)
            while len(self._logs.logs) > 1:
                self._fold_oldest()
            folder.remove_leftovers()
        with self._work:
            self._purges = [other for other in self._purges if other is not purge]
        self._on_change()
        purge.error = None
        purge.done.set()

    def _rewrite(self, file: SubIndexFile, deletion: Deletion) -> None:
        name = self._folder.new_file_name()
        path = self._folder.file_path(file.entry.name)
        tokens = self._run_job(name, containers=(path,), deletions=(deletion,))
        add = [FileEntry(name, tokens)] if tokens else []
        self._folder.publish(add=add, remove=[file])

    def _run_job(self, name: str, **inputs: Any) -> int:
        manifest = self._folder.manifest
        job = FoldJob(
            self._folder.file_path(name),
            manifest.vocab_size,
            manifest.tokenizer_fingerprint,
            self._segment_tokens,
            **inputs,
        )
        try:
            return self._worker.run(job)
        except DatastoreError:
            self._folder.discard(name)
            raise

    def _evict(self) -> None:
        """Drops the oldest files beyond max_tokens."""
        files = self._folder.live_files
        total = sum(map(_cost, files))
        while files and total > self._options.max_tokens:
            oldest = files.pop(0)
            with self._merger.paused():
                if self._folder.publish(remove=[oldest]):
                    total -= _cost(oldest)
                    self._evicted_tokens += oldest.entry.tokens

    def close(self) -> None:
        """Ends all threads; what was added is searchable, and in the logs."""
        if self._folder.read_only or self._closed:
            return
        with self._work:
            self._closed = True
            self._work.notify_all()
        self._worker.close()
        self._merger.close()
        self._thread.join()
        self._logs.close()
        for purge in self._purges:
            purge.error = "the datastore was closed; it goes on when it is opened again"
            purge.done.set()


def describe(error: Exception) -> str:
    """An error as a line for a person."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) if isinstance(error, DatastoreError) else f"{type(error).__name__}: {error}"


def _cost(file: SubIndexFile) -> int:
    """What a file counts against max_tokens."""
    return file.entry.tokens + _SEGMENT_COST * len(file.segments)


def _concerns(deletion: Deletion, file: SubIndexFile) -> bool:
    return any(
        deletion.concerns(owner) and deletion.takes(segment.documents).any()
        for owner, segment in file.segments
    )
