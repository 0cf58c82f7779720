"""Served outputs of a folder that another process writes: followed while they grow.

The writer's files are mapped when its manifest names them; what is in no file yet is read from its
logs, record by record. So a document can be found here about half a second after add() returned
there, without a word between the processes.
"""

import logging
import threading
import time
from collections.abc import Callable

import numpy as np

from .config import DatastoreError
from .folder import Folder
from .live import LiveCollection, hides, segment_limit
from .logs import LogOptions, by_namespace
from .segment import Segment, build_segments
from .wal import Deletion, LogTail

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25
_COMPLAINT_SECONDS = 60.0


class FollowedLog:
    """A log of the writer's, with its documents in memory."""

    def __init__(self, tail: LogTail, live: LiveCollection) -> None:
        self.live = live
        self.tokens = 0
        self.deletions: list[Deletion] = []
        self._tail = tail
        self._caught_up = False

    def read(self, vocab_size: int, segment_tokens: int) -> list[Deletion]:
        """Takes in what was written since the last call; returns the deletions among it."""
        content = self._tail.read()
        self.tokens += sum(document.tokens.size for _, document in content.documents)
        backlog: dict[str, list[Segment]] = {}
        for namespace, documents in by_namespace(content.documents).items():
            # A backlog is sorted at once, what comes later bit by bit.
            rest = [d for d in documents if not self._caught_up or not self.live.add(namespace, d)]
            if rest:
                backlog[namespace] = list(build_segments(rest, vocab_size, segment_tokens))
        if backlog:
            self.live.append(backlog)
        self._caught_up = True
        self.deletions += content.deletions
        return content.deletions


class FollowingCollection:
    """Documents by namespace that another process takes in. Thread-safe; nothing can be added.

    take_over: asked at each look, by the thread that follows, which ends when it returns True.
    on_change: called, in whichever thread, when something else can be found.
    """

    background_error: str | None = None
    """No files are written: nothing fails."""

    def __init__(
        self,
        folder: Folder,
        max_tokens: int,
        options: LogOptions,
        on_change: Callable[[], None],
        take_over: Callable[[], bool],
    ) -> None:
        """Raises DatastoreError: a log cannot be read or is another datastore's."""
        self._folder = folder
        self._options = options
        self._segment_tokens = segment_limit(max_tokens)
        self._on_change = on_change
        self._take_over = take_over
        self._logs: dict[int, FollowedLog] = {}
        self._looking = threading.Lock()
        self._closing = threading.Event()
        self._complained = -_COMPLAINT_SECONDS
        self._look()
        self._thread = threading.Thread(target=self._run, name="datastore-follow", daemon=True)

    def start(self) -> None:
        """Begin to follow; until then what was there at first is found."""
        self._thread.start()

    # -- reading ---------------------------------------------------------------------------

    def segments_of(self, namespace: str) -> tuple[Segment, ...]:
        """What is searchable of a namespace, oldest first."""
        logs = self._logs  # read before the files: see DurableCollection.segments_of
        fresh = [s for log in logs.values() for s in log.live.segments.get(namespace, ())]
        deletions = [d for log in logs.values() for d in log.deletions if d.concerns(namespace)]
        folded = [s for f in self._folder.live_files for s in f.by_owner.get(namespace, ())]
        return (*(s for s in folded if not hides(deletions, s)), *fresh)

    def namespaces(self) -> dict[str, int]:
        """Tokens by namespace."""
        names = [name for log in self._logs.values() for name in log.live.segments]
        names += [name for file in self._folder.live_files for name in file.by_owner]
        found = {name: self.segments_of(name) for name in dict.fromkeys(names)}
        return {name: sum(s.num_tokens for s in group) for name, group in found.items() if group}

    def flush(self, timeout: float | None) -> None:
        """Waits until all that the writer has logged is searchable, or raises TimeoutError."""
        self._look()
        for log in list(self._logs.values()):
            log.live.flush(timeout)

    def counters(self) -> dict[str, float]:
        """queued_documents, queued_tokens, ingest_lag, unfolded_tokens, evicted_tokens."""
        logs = list(self._logs.values())
        return {
            "queued_documents": sum(log.live.queued_documents for log in logs),
            "queued_tokens": sum(log.live.queued_tokens for log in logs),
            "ingest_lag": max((log.live.lag for log in logs), default=0.0),
            "unfolded_tokens": sum(log.tokens for log in logs),
            "evicted_tokens": 0,
        }

    # -- what the writer does ----------------------------------------------------------------

    def add(self, namespace: str, tokens: np.ndarray, digest: bytes) -> bool:
        """Raises DatastoreError: the writer adds."""
        raise self._refusal()

    def fold(self, timeout: float | None) -> None:
        """Raises DatastoreError: the writer folds."""
        raise self._refusal()

    def delete(self, namespace: str | None, digest: bytes | None) -> int:
        """Raises DatastoreError: the writer deletes."""
        raise self._refusal()

    def _refusal(self) -> DatastoreError:
        return DatastoreError(
            f"datastore {self._folder.path} is written by another process; ask that server"
        )

    # -- following ---------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the threads; searches still work."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        for log in self._logs.values():
            log.live.close()

    def _run(self) -> None:
        while not self._closing.wait(POLL_SECONDS):
            try:
                if self._take_over():
                    for log in self._logs.values():
                        log.live.seal()
                    return
                self._look()
            except Exception as error:  # whatever it is: the thread must go on
                now = time.monotonic()
                if now - self._complained >= _COMPLAINT_SECONDS:
                    self._complained = now
                    logger.error("The datastore cannot be followed: %s", error)

    def _look(self) -> None:
        """Take in what the writer has done since the last time."""
        with self._looking:
            changed = self._folder.follow()
            first = self._folder.manifest.first_log
            gone = [log for number, log in self._logs.items() if number < first]
            known = {number: log for number, log in self._logs.items() if number >= first}
            found = {n: known.get(n) or self._new_log(n) for n in self._folder.log_numbers()}
            deletions: list[Deletion] = []
            for number, log in list(found.items()):
                try:
                    deletions += log.read(self._folder.manifest.vocab_size, self._segment_tokens)
                except FileNotFoundError:  # folded since; the next manifest names the file
                    del found[number]
            logs = dict(sorted((known | found).items()))
            for deletion in deletions:
                for log in logs.values():
                    log.live.delete(deletion)
            changed |= bool(deletions) or logs.keys() != self._logs.keys()
            self._logs = logs
        for log in gone:
            log.live.seal()
        if changed:
            self._on_change()

    def _new_log(self, number: int) -> FollowedLog:
        manifest = self._folder.manifest
        tail = LogTail(
            self._folder.log_path(number), manifest.vocab_size, manifest.tokenizer_fingerprint
        )
        options = self._options
        live = LiveCollection(
            manifest.vocab_size, None, options.buffer_tokens, options.interval, self._on_change
        )
        return FollowedLog(tail, live)
