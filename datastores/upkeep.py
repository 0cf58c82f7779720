"""What the process that holds LOCK does to a folder's files.

Logs become sub-index files, deletions reach every file, the oldest files go.

Logs are folded when nobody writes to them any more: this process's own but for its last one, and
those of a fleet's members that are not locked (another log of that member has been begun, or its
process has ended). A deletion stands in the log that was written when it came, and that log goes
last, together with all others that hold one, in one replacement of the manifest: until then a kill
leaves the deletion to be followed again.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .config import DatastoreError
from .corpus_names import namespace_and_name
from .folder import Folder, SubIndexFile
from .folding import FoldJob, FoldWorker
from .followed_logs import FollowedLog, FollowedLogs
from .log_names import LogName, epoch_of, log_name
from .logs import Log, LogSet
from .manifest import FileEntry
from .merging import Merger
from .wal import HEADER_BYTES, Deletion

logger = logging.getLogger(__name__)

# What a segment costs beside its tokens, in tokens: namespaces are not free.
_SEGMENT_COST = 64

AnyLog = Log | FollowedLog


@dataclass(eq=False)
class Purge:
    """A deletion that files have not followed yet."""

    deletion: Deletion
    of_member: bool = False
    """Whether it came to another server than the one that folds."""
    done: threading.Event = field(default_factory=threading.Event)
    error: str | None = None
    waits_for: str | None = None
    """Whom it waits for, when nothing has failed."""
    files_follow: bool = False
    """Whether sub-index files have followed it."""


class Upkeep:
    """One thread at a time. DatastoreError, and all is as it was before the step that failed."""

    def __init__(
        self,
        folder: Folder,
        segment_tokens: int,
        max_tokens: int,
        logs: LogSet,
        followed: FollowedLogs,
        worker: FoldWorker,
        merger: Merger,
        on_change: Callable[[], None],
    ) -> None:
        self.folded_logs = 0
        self.evicted_tokens = 0
        self._folder = folder
        self._segment_tokens = segment_tokens
        self._max_tokens = max_tokens
        self._logs = logs
        self._followed = followed
        self._worker = worker
        self._merger = merger
        self._on_change = on_change

    # -- logs ------------------------------------------------------------------------------

    def own_sealed(self) -> list[AnyLog]:
        """This process's logs that can be folded, oldest first."""
        return list(self._logs.logs[:-1])

    def fold(self, logs: Sequence[AnyLog], deletions: Sequence[Deletion] = ()) -> None:
        """Turns logs into one file, without what their own and these deletions take."""
        if not logs:
            return
        for log in logs:
            log.live.flush(None)  # its thread must not be publishing when it is dropped
            if isinstance(log, Log) and log.suspect:
                self._logs.write_anew(log)
        name = self._folder.new_file_name()
        paths = tuple(self._folder.log_path(log.name) for log in logs if self._holds_any(log))
        tokens = self._run_job(name, logs=paths, deletions=tuple(deletions)) if paths else 0
        self._folder.publish(
            add=[FileEntry(name, tokens)] if tokens else [], **self._counted_out(logs)
        )
        for log in logs:
            if isinstance(log, Log):
                self._logs.forget(log)
            else:
                self._followed.forget(log)
        self._folder.unlink(*(self._folder.log_path(log.name) for log in logs))
        self.folded_logs += len(logs)
        self._on_change()
        if tokens:
            files = ", ".join(log.name.file for log in logs)
            logger.info("Folded into a sub-index of %d tokens: %s", tokens, files)

    def _holds_any(self, log: AnyLog) -> bool:
        if isinstance(log, Log):
            return log.tokens > 0
        try:
            return os.lstat(self._folder.log_path(log.name)).st_size > HEADER_BYTES
        except FileNotFoundError:
            logger.error("%s was taken away before it was folded", log.name.file)
            return False

    def _counted_out(self, logs: Sequence[AnyLog]) -> dict[str, Any]:
        """Fields of the manifest after which these logs do not count any more."""
        manifest = self._folder.manifest
        seen = [log.last_number for log in self._followed.logs]
        changes: dict[str, Any] = {
            "first_log": manifest.first_log,
            "next_number": max([self._logs.next_number, *(last + 1 for last in seen)]),
        }
        members = dict(manifest.members or {})
        for name in (log.name for log in logs):
            if name.member is None:
                changes["first_log"] = max(changes["first_log"], name.number + 1)
            else:
                members[name.member] = max(members.get(name.member, 1), name.number + 1)
        if manifest.members is not None or members:
            there = {log.member for log in map(log_name, os.listdir(self._folder.path)) if log}
            changes["members"] = {m: first for m, first in members.items() if m in there}
        return changes

    # -- deletions -------------------------------------------------------------------------

    def purge(self, batch: Sequence[Purge], sealed: Sequence[FollowedLog]) -> bool:
        """Has every file follow these deletions; False: a member's log that it waits for is open.

        batch: all that stand in any log that is sealed; sealed: logs of members, each read to its
        end after it was sealed.
        """
        deletions = tuple(purge.deletion for purge in batch)
        self._rewrite_files([p for p in batch if not p.files_follow], deletions)
        without, rest = _split([*self.own_sealed(), *sealed])
        for log in without:
            self.fold([log], deletions)
        late = self._late(deletions, sealed)
        for purge in batch:
            purge.waits_for = late and f"a server that has not begun another log yet: {late}"
        if late:
            return False
        # What members wait for is that the log with their deletion has gone: all else goes first.
        self._folder.remove_leftovers()
        self.fold(rest, deletions)
        self._folder.remove_leftovers()
        return True

    def _rewrite_files(self, purges: Sequence[Purge], deletions: Sequence[Deletion]) -> None:
        if not purges:
            return
        with self._merger.paused():
            for file in self._folder.live_files:
                if file.problem is not None:  # unreadable: whether it is concerned, none can say
                    self._folder.publish(remove=[file])
                elif any(_concerns(purge.deletion, file) for purge in purges):
                    self._rewrite(file, deletions)
        for purge in purges:
            if purge.of_member and purge.deletion.digest is None:
                self._remove_corpora(purge.deletion)
            purge.files_follow = True

    def _rewrite(self, file: SubIndexFile, deletions: Sequence[Deletion]) -> None:
        name = self._folder.new_file_name()
        path = self._folder.file_path(file.entry.name)
        tokens = self._run_job(name, containers=(path,), deletions=tuple(deletions))
        add = [FileEntry(name, tokens)] if tokens else []
        self._folder.publish(add=add, remove=[file])

    def _remove_corpora(self, deletion: Deletion) -> None:
        """Removes the corpora of a namespace that is deleted as a whole."""
        folder = self._folder

        def is_bound(corpus: str | None) -> bool:
            namespace = None if corpus is None else namespace_and_name(corpus)[0]
            return namespace is not None and deletion.concerns(namespace)

        gone = [file for file in folder.files if is_bound(file.entry.corpus)]
        building = {k: v for k, v in folder.manifest.building.items() if not is_bound(k)}
        if gone or building != folder.manifest.building:
            folder.publish(remove=gone, building=building)

    def _late(self, deletions: Sequence[Deletion], sealed: Sequence[FollowedLog]) -> str | None:
        """A log that may still get documents which these deletions take; None: there is none."""
        epoch = max(epoch_of(deletion.number) for deletion in deletions)
        complete = {log.name for log in sealed}
        late: list[LogName] = [
            log.name
            for log in self._followed.logs
            if log.name.epoch < epoch and log.name not in complete
        ]
        return late[0].file if late else None

    # -- files -----------------------------------------------------------------------------

    def evict(self) -> None:
        """Drops the oldest files beyond max_tokens."""
        files = self._folder.live_files
        total = sum(map(_cost, files))
        while files and total > self._max_tokens:
            oldest = files.pop(0)
            with self._merger.paused():
                if self._folder.publish(remove=[oldest]):
                    total -= _cost(oldest)
                    self.evicted_tokens += oldest.entry.tokens

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


def _split(logs: Sequence[AnyLog]) -> tuple[list[AnyLog], list[AnyLog]]:
    """(each member's logs before its first that holds a deletion, the others)."""
    without: list[AnyLog] = []
    rest: list[AnyLog] = []
    for log in logs:
        behind = any(other.name.member == log.name.member for other in rest)
        (rest if behind or log.deletions else without).append(log)
    return without, rest


def _cost(file: SubIndexFile) -> int:
    """What a file counts against max_tokens."""
    return file.entry.tokens + _SEGMENT_COST * len(file.segments)


def _concerns(deletion: Deletion, file: SubIndexFile) -> bool:
    return any(
        deletion.concerns(owner) and deletion.takes(segment.documents).any()
        for owner, segment in file.segments
    )
