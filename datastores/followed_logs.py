"""Logs that other processes write, read while they grow, with their documents in memory."""

import threading
from collections.abc import Callable, Sequence

from .config import DatastoreError
from .files import is_locked
from .folder import Folder
from .live import LiveCollection, Segments
from .log_names import LogName, epoch_of
from .logs import LogOptions, by_namespace
from .records import LogContent
from .segment import Document, Segment, build_segments
from .wal import Deletion, LogTail


class FollowedLog:
    """A log of another process, with its documents in memory."""

    def __init__(self, name: LogName, tail: LogTail, live: LiveCollection) -> None:
        self.name = name
        self.live = live
        self.tokens = 0
        self.deletions: list[Deletion] = []
        """Those that stand in it."""
        self.last_number = -1
        self._tail = tail
        self._caught_up = False

    @property
    def segments(self) -> Segments:
        """What is searchable of it, by namespace."""
        return self.live.segments

    def read(
        self, known: Sequence[Deletion], vocab_size: int, segment_tokens: int
    ) -> list[Deletion]:
        """Takes in what was written since the last call; returns the deletions among it.

        known: deletions that are followed already; their documents are not taken in.
        """
        content = self._tail.read()
        self.tokens += sum(document.tokens.size for _, document in content.documents)
        self.last_number = max(self.last_number, content.last_number)
        backlog: dict[str, list[Segment]] = {}
        for namespace, documents in by_namespace(_left(content, known)).items():
            # A backlog is sorted at once, what comes later bit by bit.
            rest = [d for d in documents if not self._caught_up or not self.live.add(namespace, d)]
            if rest:
                backlog[namespace] = list(build_segments(rest, vocab_size, segment_tokens))
        if backlog:
            self.live.append(backlog)
        self._caught_up = True
        self.deletions += content.deletions
        return content.deletions


class FollowedLogs:
    """The logs of a folder that this process does not write. Thread-safe.

    wanted: which logs these are. on_change: called when something else can be found.
    """

    def __init__(
        self,
        folder: Folder,
        options: LogOptions,
        segment_tokens: int,
        on_change: Callable[[], None],
        wanted: Callable[[LogName], bool],
    ) -> None:
        self.logs: tuple[FollowedLog, ...] = ()
        """Each member's in their order."""
        self._folder = folder
        self._options = options
        self._segment_tokens = segment_tokens
        self._on_change = on_change
        self._wanted = wanted
        self._looking = threading.Lock()

    def look(self, known: Callable[[], Sequence[Deletion]]) -> None:
        """Takes in what has come since the last time; `deletions` has those among it.

        known: those that are followed besides. Raises DatastoreError: a log cannot be read or is
        another datastore's; the others have been read then.
        """
        errors: list[DatastoreError] = []
        with self._looking:
            manifest = self._folder.manifest
            before = {log.name: log for log in self.logs}
            kept = {name: log for name, log in before.items() if manifest.counts(name)}
            names = filter(self._wanted, self._folder.log_names())
            found = {name: kept.get(name) or self._new_log(name) for name in names}
            followed = [*known(), *self.deletions]
            new: list[Deletion] = []
            for name, log in list(found.items()):
                try:
                    new += log.read(followed, manifest.vocab_size, self._segment_tokens)
                except FileNotFoundError:  # folded since; the next manifest names the file
                    del found[name]
                except DatastoreError as error:
                    errors.append(error)
            logs = sorted((kept | found).values(), key=lambda log: log.name.place)
            for deletion in new:
                for log in logs:
                    log.live.delete(deletion)
            changed = [log.name for log in logs] != list(before)
            self.logs = tuple(logs)
        for name in before.keys() - kept.keys():
            before[name].live.seal()
        if new or changed:
            self._on_change()
        if errors:
            raise errors[0]

    @property
    def deletions(self) -> list[Deletion]:
        """Those that stand in the logs: files may not have followed them yet."""
        return [deletion for log in self.logs for deletion in log.deletions]

    @property
    def epoch(self) -> int:
        """The latest that the logs tell of."""
        epochs = (max(log.name.epoch, epoch_of(max(log.last_number, 0))) for log in self.logs)
        return max(epochs, default=0)

    def delete(self, deletion: Deletion) -> None:
        """Takes what it concerns out of memory."""
        with self._looking:
            for log in self.logs:
                log.live.delete(deletion)

    def sealed(self) -> list[FollowedLog]:
        """Those that nobody writes to any more; of each member the first ones, in their order."""
        open_members: set[str | None] = set()
        found = []
        for log in self.logs:
            if log.name.member not in open_members and not self._is_locked(log):
                found.append(log)
            else:
                open_members.add(log.name.member)
        return found

    def _is_locked(self, log: FollowedLog) -> bool:
        try:
            return is_locked(self._folder.log_path(log.name))
        except FileNotFoundError:  # who took it away? What is in memory is all that is left
            return False

    def forget(self, log: FollowedLog) -> None:
        """Drops one that is in a file now."""
        with self._looking:
            self.logs = tuple(other for other in self.logs if other is not log)
        log.live.seal()

    def segments_of(self, namespace: str) -> list[Segment]:
        """What is searchable of a namespace, oldest first."""
        return [s for log in self.logs for s in log.segments.get(namespace, ())]

    def flush(self, timeout: float | None) -> None:
        """Waits until all that was read is searchable, or raises TimeoutError."""
        for log in self.logs:
            log.live.flush(timeout)

    def counters(self) -> dict[str, float]:
        """queued_documents, queued_tokens, ingest_lag, unfolded_tokens."""
        logs = self.logs
        return {
            "queued_documents": sum(log.live.queued_documents for log in logs),
            "queued_tokens": sum(log.live.queued_tokens for log in logs),
            "ingest_lag": max((log.live.lag for log in logs), default=0.0),
            "unfolded_tokens": sum(log.tokens for log in logs),
        }

    def close(self) -> None:
        """Makes what was read searchable and ends the threads."""
        for log in self.logs:
            log.live.close()

    def seal(self) -> None:
        """As close(), without waiting for it."""
        for log in self.logs:
            log.live.seal()

    def _new_log(self, name: LogName) -> FollowedLog:
        manifest, options = self._folder.manifest, self._options
        path = self._folder.log_path(name)
        tail = LogTail(path, manifest.vocab_size, manifest.tokenizer_fingerprint)
        live = LiveCollection(
            manifest.vocab_size, None, options.buffer_tokens, options.interval, self._on_change
        )
        return FollowedLog(name, tail, live)


def joined(*counters: dict[str, float]) -> dict[str, float]:
    """Counters of several sets of logs as one: sums, and the longest lag."""
    total: dict[str, float] = {}
    for each in counters:
        for name, value in each.items():
            of = max if name == "ingest_lag" else float.__add__
            total[name] = of(total.get(name, 0.0), float(value))
    return total


def _left(content: LogContent, known: Sequence[Deletion]) -> list[tuple[str, Document]]:
    """The documents that no known deletion takes."""
    if not known:
        return content.documents
    return [
        (namespace, document)
        for namespace, document in content.documents
        if not any(d.takes_document(namespace, document) for d in known)
    ]
