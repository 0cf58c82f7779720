"""Served outputs that survive: logged at once, searchable in memory, folded into files later.

Each log file has a LiveCollection with the same documents. When a log has grown enough, the next
one is begun, and the old log becomes a sub-index file in the background; its collection goes when
the file is mapped in its place.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from .config import DatastoreError
from .files import remove_file
from .folder import Folder, SubIndexFile
from .folding import FoldJob, FoldWorker
from .live import LiveCollection, segment_limit
from .manifest import FileEntry
from .merging import Merger
from .segment import Document, Segment, build_segments, document_lengths
from .wal import Deletion, LogWriter, read_log

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 10.0
_COMPLAINT_SECONDS = 60.0


@dataclass(frozen=True)
class DurableOptions:
    """How served outputs are kept; times in seconds."""

    max_tokens: int
    """Tokens in files; beyond them the oldest file is dropped whole."""
    buffer_tokens: int
    """Tokens that wait to be sorted, at most."""
    interval: float
    """For so long new documents are gathered before they are sorted together."""
    fold_tokens: int = 1 << 20
    """A log of so many tokens becomes a sub-index file."""
    fold_interval: float = 300.0
    """So does an older one."""
    max_unfolded_tokens: int = 1 << 24
    """Tokens in logs (and so in memory) at most; documents beyond are dropped and counted."""
    sync_interval: float = 1.0
    """The log is synced to the disk itself so often: what a power cut may cost. A kill of the
    process costs nothing."""


@dataclass(eq=False)
class _Log:
    """A log file with its documents in memory."""

    number: int
    live: LiveCollection
    tokens: int = 0
    began: float = field(default_factory=time.monotonic)


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
        self.segment_tokens = segment_limit(options.max_tokens)
        self.evicted_tokens = 0
        self._next_number = folder.manifest.next_number
        self._logs: list[_Log] = []  # oldest first; the last one is being written
        self._purges: list[_Purge] = []
        self._adding = threading.Lock()  # order of numbers, of log records and of log files
        self._work = threading.Condition()  # for _purges, _fold_wanted, _closed
        self._fold_wanted = False
        self._fold_error: str | None = None
        self._closed = False
        self._closing = threading.Event()
        self._dirty = False
        self._complained = -_COMPLAINT_SECONDS
        self._recover()
        if folder.read_only:
            return
        self._writer = self._new_writer()
        self._worker = FoldWorker()
        self._merger = Merger(folder, self.segment_tokens)
        self._threads = [
            threading.Thread(target=self._run_folds, name="datastore-fold", daemon=True),
            threading.Thread(target=self._run_syncs, name="datastore-sync", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self._merger.wake()

    # -- ingest ----------------------------------------------------------------------------

    def add(self, namespace: str, tokens: np.ndarray, digest: bytes) -> bool:
        """Logs a document and makes it searchable soon; False: there is no room, or no disk.

        When it returns True, a kill of the process does not lose the document.
        """
        with self._adding:
            self._check_open()
            log = self._logs[-1]
            unfolded = sum(log.tokens for log in self._logs) + tokens.size
            if unfolded > self._options.max_unfolded_tokens or not log.live.has_room(tokens.size):
                self._complain("it comes faster than it can be folded")
                return False
            document = Document(tokens, self._next_number, digest)
            try:
                self._writer.append(namespace, document)
            except OSError as error:
                self._complain(f"cannot write {self._writer.path}: {error.strerror or error}")
                return False
            self._next_number += 1
            self._dirty = True
            log.tokens += tokens.size
            log.live.add(namespace, document)
            full = log.tokens >= self._options.fold_tokens
        if full:
            self._wake()
        return True

    def _complain(self, reason: str) -> None:
        now = time.monotonic()
        if now - self._complained >= _COMPLAINT_SECONDS:
            self._complained = now
            logger.error("The datastore does not take in what is served: %s", reason)

    def flush(self, timeout: float | None) -> None:
        """Waits until all that was added before is searchable, or raises TimeoutError."""
        for log in list(self._logs):
            log.live.flush(timeout)

    def fold(self, timeout: float | None) -> None:
        """Waits until all that was added before is in files, or raises TimeoutError."""
        with self._adding:
            self._check_open()
            goal = self._logs[-1].number
        with self._work:
            self._fold_wanted = True
            self._fold_error = None
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
        return tuple(s for owner, s in self._all_segments() if owner == namespace)

    def namespaces(self) -> dict[str, int]:
        """Tokens by namespace."""
        totals: dict[str, int] = {}
        for owner, segment in self._all_segments():
            totals[owner] = totals.get(owner, 0) + segment.num_tokens
        return totals

    def _all_segments(self) -> Iterator[tuple[str, Segment]]:
        # The logs are read first: a document that moves from a log to a file meanwhile is then
        # seen twice for a moment rather than not at all.
        collections = [log.live.segments for log in list(self._logs)]
        hidden = [purge.deletion for purge in list(self._purges)]
        for file in self._folder.live_files:
            for owner, segment in file.segments:
                deletions = [d for d in hidden if d.concerns(owner)]
                yield from ((owner, s) for s in _without(deletions, segment, self.vocab_size))
        for collection in collections:
            for owner, group in collection.items():
                yield from ((owner, segment) for segment in group)

    @property
    def vocab_size(self) -> int:
        return self._folder.manifest.vocab_size

    def counters(self) -> dict[str, float]:
        """queued_documents, queued_tokens, ingest_lag, unfolded_tokens, evicted_tokens."""
        lives = [log.live for log in list(self._logs)]
        return {
            "queued_documents": sum(live.queued_documents for live in lives),
            "queued_tokens": sum(live.queued_tokens for live in lives),
            "ingest_lag": max((live.lag for live in lives), default=0.0),
            "unfolded_tokens": sum(log.tokens for log in list(self._logs)),
            "evicted_tokens": self.evicted_tokens,
        }

    # -- deletion --------------------------------------------------------------------------

    def delete(self, namespace: str | None, digest: bytes | None) -> int:
        """Removes documents from memory and from all files; returns their tokens.

        Searches do not find them from the start; on return no file has them either. Raises
        DatastoreError if a file cannot be rewritten: then it is tried again until it can, also
        after a restart.
        """
        self.flush(None)
        with self._adding:
            self._check_open()
            purge = _Purge(Deletion(self._next_number, namespace, digest))
            removed = self._count(purge.deletion)
            try:
                self._writer.append_deletion(purge.deletion)
                self._writer.sync()
            except OSError as error:
                raise DatastoreError(
                    f"cannot write {self._writer.path}: {error.strerror or error}"
                ) from None
            self._next_number += 1
            with self._work:
                self._purges = [*self._purges, purge]
            for log in self._logs:
                log.live.delete(purge.deletion)
        self._on_change()
        self._wake()
        purge.done.wait()
        if purge.error is not None:
            raise DatastoreError(f"deleted from memory, but not from all files yet: {purge.error}")
        return removed

    def _count(self, deletion: Deletion) -> int:
        """Tokens of the documents that it takes."""
        total = 0
        for owner, segment in self._all_segments():
            if deletion.concerns(owner):
                gone = deletion.takes(segment.documents)
                total += int((document_lengths(segment)[gone] - 1).sum())
        return total

    # -- logs ------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Brings the documents of all logs back into memory, and takes up deletions again."""
        manifest = self._folder.manifest
        for number in self._folder.log_numbers():
            path = self._folder.log_path(number)
            content = read_log(path, manifest.vocab_size, manifest.tokenizer_fingerprint)
            if content.damaged_bytes:
                logger.warning("%s: %d bytes passed over", path, content.damaged_bytes)
            log = _Log(number, self._new_live())
            log.tokens = sum(d.tokens.size for _, d in content.documents)
            for namespace, documents in _grouped(content.documents).items():
                log.live.append(
                    namespace,
                    list(build_segments(documents, manifest.vocab_size, self.segment_tokens)),
                )
            log.live.seal()
            self._logs.append(log)
            self._next_number = max(self._next_number, content.last_number + 1)
            for deletion in content.deletions:
                for earlier in self._logs:
                    earlier.live.delete(deletion)
                self._purges.append(_Purge(deletion))

    def _new_live(self) -> LiveCollection:
        buffer_tokens, interval = self._options.buffer_tokens, self._options.interval
        return LiveCollection(self.vocab_size, None, buffer_tokens, interval, self._on_change)

    def _new_writer(self) -> LogWriter:
        """Begins the next log. DatastoreError if it cannot be written."""
        folder = self._folder
        numbers = [log.number for log in self._logs]
        number = max([folder.manifest.first_log - 1, *numbers]) + 1
        path = folder.log_path(number)
        try:
            writer = LogWriter(path, self.vocab_size, folder.manifest.tokenizer_fingerprint)
        except OSError as error:
            remove_file(path)
            raise DatastoreError(f"cannot write {path}: {error.strerror or error}") from None
        self._logs = [*self._logs, _Log(number, self._new_live())]
        return writer

    def _rotate(self) -> None:
        """Begins another log; the caller holds _adding. The old one stays if it cannot."""
        old = self._writer
        self._writer = self._new_writer()
        self._logs[-2].live.seal()
        old.sync()
        old.close()

    def _run_syncs(self) -> None:
        while not self._closing.wait(self._options.sync_interval):
            if self._dirty:
                with self._adding:
                    self._dirty = False
                    sync = self._writer.detached_sync()
                try:
                    sync()
                except OSError as error:
                    self._complain(f"cannot sync {self._writer.path}: {error.strerror or error}")

    # -- folding ---------------------------------------------------------------------------

    def _wake(self) -> None:
        with self._work:
            self._work.notify_all()

    def _run_folds(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(self._has_work, 1.0)
                if self._closed:
                    return
            try:
                self._step()
            except DatastoreError as error:
                if self._closed:
                    return
                logger.error("The datastore's files could not be written: %s", error)
                with self._work:
                    self._fold_error = str(error)
                    for purge in self._purges:
                        purge.error = str(error)
                        purge.done.set()
                    self._work.notify_all()
                    self._work.wait_for(lambda: self._closed, _RETRY_SECONDS)

    def _has_work(self) -> bool:
        return bool(self._closed or self._purges or len(self._logs) > 1 or self._must_rotate())

    def _must_rotate(self) -> bool:
        log, options = self._logs[-1], self._options
        age = time.monotonic() - log.began
        return self._fold_wanted or (
            log.tokens > 0 and (log.tokens >= options.fold_tokens or age >= options.fold_interval)
        )

    def _step(self) -> None:
        if self._must_rotate():
            self._fold_wanted = False
            with self._adding:
                self._rotate()
        if self._purges:
            self._purge(self._purges[0])
        elif len(self._logs) > 1:
            self._fold_oldest()
            self._evict()
            self._merger.wake()
        self._wake()

    def _fold_oldest(self) -> None:
        """Turns the oldest log into a file."""
        log, folder = self._logs[0], self._folder
        log.live.flush(None)  # its thread must not be publishing when it is dropped
        name = folder.new_file_name()
        job = self._job(name, logs=(folder.log_path(log.number),))
        tokens = self._run_job(name, job) if log.tokens else 0
        add = [FileEntry(name, tokens)] if tokens else []
        folder.publish(add=add, first_log=log.number + 1, next_number=self._next_number)
        remove_file(folder.log_path(log.number))
        self._logs = [other for other in self._logs if other is not log]
        self._on_change()
        if tokens:
            logger.info("Log %d folded into a sub-index of %d tokens", log.number, tokens)

    def _purge(self, purge: _Purge) -> None:
        """Rewrites every file that the deletion concerns, then folds the logs that it may."""
        folder, deletion = self._folder, purge.deletion
        with self._adding:
            self._rotate()  # what it takes may be in the log that is being written
        with self._merger.paused():
            for file in folder.live_files:
                if file.problem is not None:  # unreadable: whether it is concerned, none can say
                    folder.publish(remove=[file])
                elif _concerns(deletion, file):
                    name = folder.new_file_name()
                    path = folder.file_path(file.entry.name)
                    job = self._job(name, containers=(path,), deletions=(deletion,))
                    tokens = self._run_job(name, job)
                    add = [FileEntry(name, tokens)] if tokens else []
                    folder.publish(add=add, remove=[file])
            while len(self._logs) > 1:
                self._fold_oldest()
        with self._work:
            self._purges = [other for other in self._purges if other is not purge]
        self._on_change()
        purge.error = None
        purge.done.set()

    def _job(self, name: str, **inputs) -> FoldJob:
        manifest = self._folder.manifest
        return FoldJob(
            self._folder.file_path(name),
            manifest.vocab_size,
            manifest.tokenizer_fingerprint,
            self.segment_tokens,
            **inputs,
        )

    def _run_job(self, name: str, job: FoldJob) -> int:
        try:
            return self._worker.run(job)
        except DatastoreError:
            self._folder.discard(name)
            raise

    def _evict(self) -> None:
        """Drops the oldest files beyond max_tokens."""
        files = self._folder.live_files
        total = sum(file.entry.tokens for file in files)
        while files and total > self._options.max_tokens:
            oldest = files.pop(0)
            with self._merger.paused():
                if self._folder.publish(remove=[oldest]):
                    total -= oldest.entry.tokens
                    self.evicted_tokens += oldest.entry.tokens

    def _check_open(self) -> None:
        if self._folder.read_only:
            raise DatastoreError(f"datastore {self._folder.path} was opened to be read only")
        if self._closed:
            raise DatastoreError("the datastore is closed")

    def close(self) -> None:
        """Makes what was added searchable and ends all threads; the log keeps what it has."""
        if self._folder.read_only or self._closed:
            return
        with self._adding, self._work:
            self._closed = True
            self._closing.set()
            self._work.notify_all()
        self._worker.close()
        self._merger.close()
        for thread in self._threads:
            thread.join()
        for log in self._logs:
            log.live.close()
        self._writer.sync()
        self._writer.close()


def _grouped(documents: list[tuple[str, Document]]) -> dict[str, list[Document]]:
    groups: dict[str, list[Document]] = {}
    for namespace, document in documents:
        groups.setdefault(namespace, []).append(document)
    return groups


def _concerns(deletion: Deletion, file: SubIndexFile) -> bool:
    return any(
        deletion.concerns(owner) and deletion.takes(segment.documents).any()
        for owner, segment in file.segments
    )


def _without(deletions: list[Deletion], segment: Segment, vocab_size: int) -> tuple[Segment, ...]:
    """The segment while deletions are pending: left out whole if they take any of it.

    Rewriting it is the fold process's work; until that is done a little less is found.
    """
    if any(deletion.takes(segment.documents).any() for deletion in deletions):
        return ()
    return (segment,)
