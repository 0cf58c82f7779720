"""Served outputs of a folder whose LOCK another process holds: a member of a fleet.

A member takes in what its own server serves, in logs of its own, and follows what the others take
in: sub-index files are mapped when the manifest names them; what is in no file yet is read from
the logs of all others, record by record. So a document can be found here about half a second after
add() returned in another process, without a word between them. Its logs become files in the
process that holds LOCK (durable.py). When that one ends, whoever gets LOCK first takes its place;
until then all go on, and logs grow.

A folder that no fleet has used, because LOCK's holder has not opened it as a shared one, is
followed only.
"""

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable

import numpy as np

from .config import DatastoreInUse, DeletionPending
from .durable import DELETION_SECONDS, POLL_SECONDS, DurableOptions
from .files import sync_folder
from .folder import Folder
from .followed_logs import FollowedLogs, joined
from .live import count_taken, hides, segment_limit
from .log_names import LogName, epoch_of, first_number, log_name
from .logs import Log, LogSet
from .manifest import read_manifest
from .segment import Segment
from .wal import Deletion

logger = logging.getLogger(__name__)

_COMPLAINT_SECONDS = 60.0
_DELETION_POLL_SECONDS = 0.05


class FollowingCollection:
    """Documents by namespace of a member. Thread-safe.

    take_over: asked at each look, by the thread that follows, which ends when it returns True; then
    another collection is in its place, and this one takes in nothing more (DatastoreClosed).
    on_change: called, in whichever thread, when something else can be found.
    """

    def __init__(
        self,
        folder: Folder,
        options: DurableOptions,
        on_change: Callable[[], None],
        take_over: Callable[[], bool],
    ) -> None:
        """Raises DatastoreError: a log cannot be read or is another datastore's, or a new one
        cannot be written."""
        self._folder = folder
        self._options = options
        self._segment_tokens = segment_limit(options.max_tokens)
        self._on_change = on_change
        self._take_over = take_over
        self._member = secrets.token_hex(4)
        self._followed = FollowedLogs(
            folder, options.logs, self._segment_tokens, on_change,
            lambda log: log.member != self._member,
        )  # fmt: skip
        self._own: LogSet | None = None
        """None: the folder is not a fleet's."""
        self._noticed: set[Deletion] = set()
        """Deletions by others that this member's logs follow already."""
        self._looking = threading.Lock()
        self._rotating = threading.Lock()
        self._closing = threading.Event()
        self._complained = -_COMPLAINT_SECONDS
        self._look()
        self._thread = threading.Thread(target=self._run, name="datastore-follow", daemon=True)

    def start(self) -> None:
        """Begin to follow; until then what was there at first is found."""
        self._thread.start()

    @property
    def background_error(self) -> str | None:
        """Why this member's log is not on the disk itself; None: it is."""
        return None if self._own is None else self._own.sync_error

    # -- ingest ------------------------------------------------------------------------------

    def add(self, namespace: str, tokens: np.ndarray, digest: bytes) -> bool:
        """As LogSet.add(); False also where the folder is not a fleet's."""
        if self._own is None:
            self._complain(f"the process that writes to {self._folder.path} does not share it")
            return False
        return self._own.add(namespace, tokens, digest)

    def flush(self, timeout: float | None) -> None:
        """Waits until all that was logged, here and elsewhere, is searchable, or raises
        TimeoutError."""
        self._look()
        self._followed.flush(timeout)
        if self._own is not None:
            self._own.flush(timeout)

    def fold(self, timeout: float | None) -> None:
        """Raises DatastoreInUse: another process folds."""
        raise self._refusal()

    def _refusal(self) -> DatastoreInUse:
        return DatastoreInUse(
            f"datastore {self._folder.path} is written by another process; ask that server"
        )

    # -- reading ---------------------------------------------------------------------------

    def segments_of(self, namespace: str) -> tuple[Segment, ...]:
        """What is searchable of a namespace, oldest first."""
        return self._segments(namespace, None)

    def _segments(self, namespace: str, but: Deletion | None) -> tuple[Segment, ...]:
        """As segments_of(), as if there were one of the deletions not."""
        # Logs are read before the files: see DurableCollection.segments_of.
        own = [] if self._own is None else self._own.segments_of(namespace)
        fresh = [*self._followed.segments_of(namespace), *own]
        deletions = [d for d in self._deletions() if d != but and d.concerns(namespace)]
        folded = [s for f in self._folder.live_files for s in f.by_owner.get(namespace, ())]
        return (*(s for s in folded if not hides(deletions, s)), *fresh)

    def namespaces(self) -> dict[str, int]:
        """Tokens by namespace."""
        found = {name: self.segments_of(name) for name in self._owners()}
        return {name: sum(s.num_tokens for s in group) for name, group in found.items() if group}

    def _owners(self) -> list[str]:
        names = [name for log in self._followed.logs for name in log.segments]
        names += [name for log in self._own_logs() for name in log.segments]
        names += [name for file in self._folder.live_files for name in file.by_owner]
        return list(dict.fromkeys(names))

    def counters(self) -> dict[str, float]:
        """queued_documents, queued_tokens, ingest_lag, unfolded_tokens, evicted_tokens,
        pending_deletions."""
        own = [] if self._own is None else [self._own.counters()]
        pending = len(set(self._deletions()))
        return {
            **joined(self._followed.counters(), *own),
            "evicted_tokens": 0,
            "pending_deletions": pending,
        }

    def _own_logs(self) -> tuple[Log, ...]:
        return () if self._own is None else self._own.logs

    def _deletions(self) -> list[Deletion]:
        """Those that some file may not have followed yet."""
        return [*self._followed.deletions, *self._own_deletions()]

    # -- deletion ----------------------------------------------------------------------------

    def delete(
        self,
        namespace: str | None,
        digest: bytes | None,
        timeout: float | None = DELETION_SECONDS,
    ) -> int:
        """Removes documents from memory and, through LOCK's holder, from all files and logs.

        As DurableCollection.delete(); DeletionPending also if no process holds LOCK for so long, or
        another member does not begin another log.
        """
        own = self._own
        if own is None:
            raise self._refusal()
        with contextlib.suppress(TimeoutError):
            self.flush(timeout)
        removed, holder = 0, own.current.name

        def count(deletion: Deletion) -> None:
            nonlocal removed, holder
            holder = own.current.name  # no other log is begun meanwhile
            owners = filter(deletion.concerns, self._owners())
            removed = sum(count_taken(deletion, self._segments(o, deletion)) for o in owners)

        self._followed.delete(own.delete(namespace, digest, count))
        self._on_change()
        self._keep_own()  # another log, which the deletion does not take
        self._wait_until_gone(holder, timeout)
        return removed

    def _wait_until_gone(self, log: LogName, timeout: float | None) -> None:
        """Returns when a log, and all that was folded with it or before, is on the disk no more."""
        deadline = None if timeout is None else time.monotonic() + timeout
        reason = None
        while not self._is_gone(log):
            if self._closing.is_set():
                reason = "the datastore was closed; the server that folds goes on with it"
            elif deadline is not None and time.monotonic() > deadline:
                reason = f"it takes more than {timeout} s"
            if reason is not None:
                raise DeletionPending(
                    f"deleted from memory, but not from all files yet: {reason}. The server that "
                    "folds goes on until it is through, also after a restart; delete again to "
                    "know when"
                )
            time.sleep(_DELETION_POLL_SECONDS)
        sync_folder(self._folder.path)

    def _is_gone(self, log: LogName) -> bool:
        manifest = read_manifest(self._folder.path)
        if manifest is None or manifest.counts(log):
            return False
        there = filter(None, map(log_name, os.listdir(self._folder.path)))
        return all(manifest.counts(name) for name in there)

    # -- following ---------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the threads; searches still work. What was added is in the logs."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self._followed.close()
        if self._own is not None:
            self._own.close()

    def _run(self) -> None:
        while not self._closing.wait(POLL_SECONDS):
            try:
                if self._take_over():
                    self._retire()
                    return
            except Exception as error:  # whatever it is: the thread must go on
                self._complain(f"it cannot become the one that folds: {error}")
            try:
                self._look()
                self._keep_own()
            except Exception as error:
                self._complain(f"it cannot be followed: {error}")

    def _look(self) -> None:
        """Takes in what others have done since the last time."""
        with self._looking:
            changed = self._folder.follow()
            try:
                self._followed.look(self._own_deletions)
            finally:
                self._join()
                changed |= self._follow_with_own()
        if changed:
            self._on_change()

    def _own_deletions(self) -> list[Deletion]:
        return [deletion for log in self._own_logs() for deletion in log.deletions]

    def _join(self) -> None:
        """Begins a log of this member's own, once the folder is a fleet's."""
        manifest = self._folder.manifest
        if self._own is None and manifest.members is not None and not self._closing.is_set():
            epoch = max(self._followed.epoch, epoch_of(manifest.next_number))
            self._own = LogSet(
                self._folder, self._options.logs, self._segment_tokens, self._on_change,
                self._member, first_number(epoch),
            )  # fmt: skip

    def _follow_with_own(self) -> bool:
        """Has this member's logs follow what others have deleted and folded.

        Returns whether something else can be found.
        """
        own, manifest = self._own, self._folder.manifest
        if own is None:
            return False
        deletions = self._followed.deletions
        new = [deletion for deletion in deletions if deletion not in self._noticed]
        self._noticed = set(deletions)
        own.follow(new, max(self._followed.epoch, epoch_of(manifest.next_number)))
        folded = [log for log in own.logs[:-1] if not manifest.counts(log.name)]
        for log in folded:
            own.forget(log)
        return bool(folded or new)

    def _keep_own(self) -> None:
        """Begins another log where the last one is large or old, or others are in a later epoch."""
        own, options = self._own, self._options
        if own is None:
            return
        with self._rotating:
            log = own.current
            # Another process took this one for dead: a file system that loses locks.
            lost = not self._folder.manifest.counts(log.name)
            if lost:
                logger.error("%s was folded while it was written to", log.name.file)
            if (
                lost
                or log.suspect
                or log.name.epoch < own.epoch
                or log.is_due(options.fold_tokens, options.fold_interval)
            ):
                own.rotate()
            own.mend()

    def _retire(self) -> None:
        """Ends this member, whose place another collection of this process has taken."""
        self._followed.seal()
        if self._own is not None:
            self._own.close()

    def _complain(self, reason: str) -> None:
        now = time.monotonic()
        if now - self._complained >= _COMPLAINT_SECONDS:
            self._complained = now
            logger.error("The datastore's folder is shared, and %s", reason)
