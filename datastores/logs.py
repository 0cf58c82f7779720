"""The logs of a folder with their documents in memory: durable at once, searchable soon.

Each log file has a LiveCollection with the same documents. The last log is being written; older
ones wait to be folded into a sub-index file: by this process, or, where it is a member of a fleet,
by the one that holds LOCK.
"""

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .config import DatastoreClosed, DatastoreError
from .files import remove_if_file, replace_file
from .folder import Folder
from .live import LiveCollection, Segments
from .log_names import EPOCH_LIMIT, LogName, epoch_of, first_number
from .room import Room
from .segment import Document, Segment, build_segments, documents_of
from .wal import Deletion, LogWriter, log_bytes, read_log

logger = logging.getLogger(__name__)

_COMPLAINT_SECONDS = 60.0


@dataclass(frozen=True)
class LogOptions:
    """How served outputs are taken in; times in seconds."""

    buffer_tokens: int
    """Tokens that wait to be sorted, at most."""
    interval: float
    """For so long new documents are gathered before they are sorted together."""
    max_unfolded_tokens: int = 1 << 24
    """Tokens in logs (and so in memory) at most; documents beyond are dropped and counted."""
    sync_interval: float = 1.0
    """The log is synced to the disk itself so often: what a power cut may cost. A kill of the
    process costs nothing."""
    share: float = 1.0
    """A namespace's part of buffer_tokens and of max_unfolded_tokens (Room)."""


@dataclass(eq=False)
class Log:
    """A log file with its documents in memory."""

    name: LogName
    live: LiveCollection
    first_number: int
    """No document or deletion in it has a lower one."""
    held: Counter[str] = field(default_factory=Counter)
    """Tokens in it by namespace, those of deleted documents too."""
    tokens: int = 0
    began: float = field(default_factory=time.monotonic)
    deletions: list[Deletion] = field(default_factory=list)
    """Those that stand in it."""
    suspect: bool = False
    """Whether the disk refused to confirm it: what the file holds is not known any more, and a
    second sync would prove nothing. Memory has it all; the file is to be written anew."""

    @property
    def segments(self) -> Segments:
        """What is searchable of it, by namespace."""
        return self.live.segments

    def is_due(self, fold_tokens: int, fold_interval: float) -> bool:
        """Whether it is so large, or holds something and is so old (seconds), that it is folded."""
        age = time.monotonic() - self.began
        return self.tokens > 0 and (self.tokens >= fold_tokens or age >= fold_interval)

    def count(self, namespace: str, tokens: int) -> None:
        """Note a document that was written to it."""
        self.held[namespace] += tokens
        self.tokens += tokens


class LogSet:
    """This process's logs that count, oldest first. Thread-safe.

    Those of LOCK's holder, or with `member`, those of a member of a fleet, which writes to a folder
    that is read-only to it otherwise. Without `member` nothing is added to a read-only folder.
    """

    def __init__(
        self,
        folder: Folder,
        options: LogOptions,
        segment_tokens: int,
        on_change: Callable[[], None],
        member: str | None = None,
        next_number: int = 0,
    ) -> None:
        """Brings the documents of all logs back into memory, in segments of at most that size.

        member: its id, which no process had before, so that there are none. next_number: that of
        the next document, at least.

        Raises DatastoreError: a log cannot be read or is another datastore's, or a new one cannot
        be written.
        """
        self._folder = folder
        self._options = options
        self._segment_tokens = segment_tokens
        self._on_change = on_change
        self._member = member
        self._writes = member is not None or not folder.read_only
        self.logs: tuple[Log, ...] = ()
        self.deletions: list[Deletion] = []
        """Those that the logs hold: files may not have followed them yet."""
        self.next_number = max(next_number, folder.manifest.next_number)
        self._last_number = 0  # of a log file
        self._unfolded = Room(options.max_unfolded_tokens, options.share)  # for all logs
        self._adding = threading.Lock()  # order of numbers, of log records and of log files
        self._dirty = False
        self.sync_error: str | None = None
        """Why the last attempt to have the log on the disk failed; None: it did not."""
        self._complained = -_COMPLAINT_SECONDS
        self._closing = threading.Event()
        self._held: list[tuple[Log, LogWriter]] = []
        """Sealed logs of a member that nobody may fold before they are written anew."""
        if member is None:
            self._recover()
        if self._writes:
            self._writer = self._new_writer()
            self._thread = threading.Thread(
                target=self._run_syncs, name="datastore-sync", daemon=True
            )
            self._thread.start()

    @property
    def current(self) -> Log:
        """The log that is being written."""
        return self.logs[-1]

    def add(self, namespace: str, tokens: np.ndarray, digest: bytes) -> bool:
        """Logs a document, then queues it to be searchable; False: there is no room, or no disk.

        When it returns True, a kill of the process does not lose the document.
        """
        with self._adding:
            self._check_open()
            log = self.current
            if not (
                self._unfolded.fits(namespace, tokens.size)
                and log.live.has_room(namespace, tokens.size)
            ):
                self._complain("it comes faster than it can be folded, or faster in one namespace")
                return False
            document = Document(tokens, self.next_number, digest)
            try:
                self._writer.append(namespace, document)
            except OSError as error:
                log.suspect |= self._writer.failed is not None
                self._complain(f"cannot write {self._writer.path}: {error.strerror or error}")
                return False
            self.next_number += 1
            self._dirty = True
            log.count(namespace, tokens.size)
            self._unfolded.take(namespace, tokens.size)
            log.live.add(namespace, document)
            return True

    def delete(
        self, namespace: str | None, digest: bytes | None, before: Callable[[Deletion], None]
    ) -> Deletion:
        """Logs a deletion and takes what it concerns out of memory.

        before is called with it in between, so that no search can find in files what is gone from
        memory. DatastoreError if the log cannot be written.
        """
        with self._adding:
            self._check_open()
            deletion = Deletion(first_number(self.epoch + 1), namespace, digest)
            try:
                self._writer.append_deletion(deletion)
            except OSError as error:
                self.current.suspect |= self._writer.failed is not None
                raise DatastoreError(
                    f"cannot write {self._writer.path}: {error.strerror or error}; nothing was "
                    "deleted: try again when the disk can be written"
                ) from None
            self.next_number = deletion.number + 1
            self._dirty = True
            self.current.deletions.append(deletion)
            before(deletion)
            for log in self.logs:
                log.live.delete(deletion)
            return deletion

    @property
    def epoch(self) -> int:
        """That of the next document (log_names.py)."""
        return epoch_of(self.next_number)

    def follow(self, deletions: Sequence[Deletion], epoch: int) -> None:
        """Takes what others have deleted out of memory, and counts on from the latest epoch."""
        with self._adding:
            self.next_number = max(self.next_number, first_number(epoch))
            for deletion in deletions:
                for log in self.logs:
                    log.live.delete(deletion)

    def rotate(self) -> None:
        """Begins another log. DatastoreError if it cannot be written; the old one goes on then."""
        with self._adding:
            self._check_open()
            old, sealed = self._writer, self.current
            self._writer = self._new_writer()
            sealed.live.seal()
        try:
            old.sync()  # outside the lock: it may take long, and add() must not wait for it
        except OSError as error:
            self._distrust(sealed, error)
        if sealed.suspect and self._member is not None:
            self._held.append((sealed, old))
            return
        with contextlib.suppress(OSError):
            old.close()

    def mend(self) -> None:
        """Writes a member's sealed logs anew that the disk did not confirm, and lets go of them.

        DatastoreError if one cannot be written. One thread at a time, that which rotates.
        """
        while self._held:
            log, writer = self._held[0]
            self.write_anew(log)
            self._held.pop(0)
            with contextlib.suppress(OSError):
                writer.close()

    def write_anew(self, log: Log) -> None:
        """Writes a sealed log's file again from memory, on the disk itself.

        DatastoreError, and the file is as it was, if it cannot.
        """
        log.live.flush(None)
        manifest = self._folder.manifest
        documents = [
            (namespace, document)
            for namespace, segments in log.segments.items()
            for segment in segments
            for document in documents_of(segment)
        ]
        content = log_bytes(
            manifest.vocab_size, manifest.tokenizer_fingerprint, documents, log.deletions
        )
        with replace_file(self.path(log)) as file:
            file.write(content)
        log.suspect = False
        self.sync_error = None
        logger.info("Log %s was written anew", log.name.file)

    def _distrust(self, log: Log, error: OSError) -> None:
        log.suspect = True
        self.sync_error = f"cannot sync {self.path(log)}: {error.strerror or error}"
        self._complain(self.sync_error)

    def forget(self, log: Log) -> None:
        """Drops a log from memory that is in a file now."""
        with self._adding:
            self.logs = tuple(other for other in self.logs if other is not log)
            for namespace, tokens in log.held.items():
                self._unfolded.give_back(namespace, tokens)

    def path(self, log: Log) -> str:
        return self._folder.log_path(log.name)

    def flush(self, timeout: float | None) -> None:
        """Waits until all that was added before is searchable, or raises TimeoutError."""
        for log in self.logs:
            log.live.flush(timeout)

    @property
    def unfolded_tokens(self) -> int:
        """Tokens in logs."""
        return self._unfolded.tokens

    def segments_of(self, namespace: str) -> list[Segment]:
        """What is searchable of a namespace, oldest first."""
        return [s for log in self.logs for s in log.segments.get(namespace, ())]

    def counters(self) -> dict[str, float]:
        """queued_documents, queued_tokens, ingest_lag, unfolded_tokens."""
        lives = [log.live for log in self.logs]
        return {
            "queued_documents": sum(live.queued_documents for live in lives),
            "queued_tokens": sum(live.queued_tokens for live in lives),
            "ingest_lag": max((live.lag for live in lives), default=0.0),
            "unfolded_tokens": self.unfolded_tokens,
        }

    def close(self) -> None:
        """Makes what was added searchable, syncs and closes the log."""
        with self._adding:
            if self._closing.is_set():
                return
            self._closing.set()
        self._thread.join()
        for log in self.logs:
            log.live.close()
        try:
            self._writer.sync()
        except OSError as error:
            self._distrust(self.current, error)
        try:
            self.mend()
            if self.current.suspect:
                self.write_anew(self.current)
        except DatastoreError as error:
            logger.error("The last outputs may not survive a power cut: %s", error)
        for writer in (self._writer, *(writer for _, writer in self._held)):
            with contextlib.suppress(OSError):
                writer.close()

    def _recover(self) -> None:
        manifest = self._folder.manifest
        for name in self._folder.log_names():
            if name.member is not None:
                continue
            path = self._folder.log_path(name)
            content = read_log(path, manifest.vocab_size, manifest.tokenizer_fingerprint)
            if content.damaged_bytes:
                logger.warning("%s: %d bytes passed over", path, content.damaged_bytes)
            log = Log(name, self._new_live(), 0)
            for namespace, document in content.documents:
                log.count(namespace, document.tokens.size)
                self._unfolded.take(namespace, document.tokens.size)
            log.live.append(
                {
                    namespace: list(
                        build_segments(documents, manifest.vocab_size, self._segment_tokens)
                    )
                    for namespace, documents in by_namespace(content.documents).items()
                }
            )
            log.live.seal()
            self.logs = (*self.logs, log)
            self.next_number = max(self.next_number, content.last_number + 1)
            log.deletions = list(content.deletions)
            for deletion in content.deletions:
                self.deletions.append(deletion)
                for earlier in self.logs:
                    earlier.live.delete(deletion)

    def _new_live(self) -> LiveCollection:
        return LiveCollection(
            self._folder.manifest.vocab_size,
            None,
            self._options.buffer_tokens,
            self._options.interval,
            self._on_change,
            self._options.share,
        )

    def _new_writer(self) -> LogWriter:
        manifest, member = self._folder.manifest, self._member
        folded = manifest.first_log - 1 if member is None else self._last_number
        self._last_number = max([folded, *(log.name.number for log in self.logs)]) + 1
        name = LogName(member, self._last_number, 0 if member is None else self.epoch)
        path = self._folder.log_path(name)
        try:
            writer = LogWriter(
                path,
                manifest.vocab_size,
                manifest.tokenizer_fingerprint,
                locked=member is not None,
            )
        except OSError as error:
            if not isinstance(error, FileExistsError):
                remove_if_file(path)
            raise DatastoreError(f"cannot write {path}: {error.strerror or error}") from None
        self.logs = (*self.logs, Log(name, self._new_live(), self.next_number))
        return writer

    def _run_syncs(self) -> None:
        while not self._closing.wait(self._options.sync_interval):
            if self._dirty:
                self._sync_current()

    def _sync_current(self) -> None:
        with self._adding:
            log = self.current
            try:
                sync = self._writer.detached_sync()
            except OSError as error:  # no descriptor is left: nothing has been tried yet
                self._complain(f"cannot sync {self._writer.path}: {error.strerror or error}")
                return
            self._dirty = False
        try:
            sync()
        except OSError as error:
            self._distrust(log, error)

    def _complain(self, reason: str) -> None:
        now = time.monotonic()
        if now - self._complained >= _COMPLAINT_SECONDS:
            self._complained = now
            logger.error("The datastore does not take in all that is served: %s", reason)

    def _check_open(self) -> None:
        if not self._writes:
            raise DatastoreError(f"datastore {self._folder.path} was opened to be read only")
        if self._closing.is_set():
            raise DatastoreClosed("the datastore is closed")
        if self.epoch >= EPOCH_LIMIT - 1:
            raise DatastoreError(
                f"datastore {self._folder.path} has used up its numbers: no datastore of ours has "
                "so many deletions; build it anew"
            )


def by_namespace(documents: list[tuple[str, Document]]) -> dict[str, list[Document]]:
    """The documents of each namespace, in their order."""
    groups: dict[str, list[Document]] = {}
    for namespace, document in documents:
        groups.setdefault(namespace, []).append(document)
    return groups
