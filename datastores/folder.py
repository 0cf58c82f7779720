"""A datastore's folder: its manifest, and the sub-index files that the manifest names.

LOCK            held by the one process that folds; a kill releases it
MANIFEST        which files count (manifest.py)
sub-*.idx       sub-indices (container.py)
log-*.wal       served outputs that are in no sub-index yet (wal.py)
member-*.wal    those of the other servers of a fleet (log_names.py)
"""

import logging
import os
import secrets
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from .config import DatastoreError
from .container import Container, read_container
from .files import (
    FolderLock,
    NotSynced,
    check_owner,
    remove_file,
    remove_if_file,
    remove_temporaries,
    sync_folder,
)
from .log_names import FILE_NUMBER_LIMIT, LogName, log_name
from .manifest import (
    FileEntry,
    Manifest,
    check_same_tokenizer,
    manifest_stamp,
    read_manifest,
    write_manifest,
)
from .segment import Segment

logger = logging.getLogger(__name__)

_READ_ATTEMPTS = 5


@dataclass(frozen=True, eq=False)
class SubIndexFile:
    """A file that the manifest names, mapped."""

    entry: FileEntry
    segments: tuple[tuple[str, Segment], ...]
    problem: str | None = None
    """Why it is not served; segments is empty then."""

    @cached_property
    def by_owner(self) -> dict[str, tuple[Segment, ...]]:
        """Segments of the file by namespace or corpus."""
        found: dict[str, tuple[Segment, ...]] = {}
        for owner, segment in self.segments:
            found[owner] = (*found.get(owner, ()), segment)
        return found


class Folder:
    """The files of one datastore. Thread-safe."""

    def __init__(
        self,
        path: str,
        *,
        vocab_size: int | None,
        tokenizer_fingerprint: str | None,
        create: bool,
        read_only: bool,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Opens or creates it. Sub-indices that are damaged are left out, and named in problems.

        Raises DatastoreError: there is none and it is not to be created, another process writes
        to it, its manifest is damaged, or it was built for another tokenizer.
        """
        self.path = os.path.abspath(path)
        self.read_only = read_only
        self.on_change = on_change
        self._changing = threading.RLock()
        self._lock: FolderLock | None = None
        self._leftovers: set[str] = set()
        """Paths that no manifest names, still to be unlinked."""
        self._given_names: set[str] = set()
        """Of files that this process writes, which the manifest may not name yet."""
        self._unsynced = False
        """Whether a power cut may bring the manifest before this one back."""
        if not read_only:
            self._prepare(create, vocab_size)
        check_folder_owner(self.path)
        if not read_only:
            self._lock = FolderLock(self.path)
        try:
            self._open(vocab_size, tokenizer_fingerprint, create)
        except BaseException:
            self.close()
            raise

    def _prepare(self, create: bool, vocab_size: int | None) -> None:
        if os.path.exists(self.path) and not os.path.isdir(self.path):
            raise DatastoreError(f"datastore {self.path} must be a folder, and is a file")
        if not os.path.isdir(self.path):
            if not create or vocab_size is None:
                raise DatastoreError(f"there is no datastore folder {self.path}")
            try:
                os.makedirs(self.path, mode=0o700)
            except OSError as error:
                raise DatastoreError(
                    f"cannot create datastore {self.path}: {error.strerror or error}"
                ) from None

    def _open(self, vocab_size: int | None, fingerprint: str | None, create: bool) -> None:
        for attempt in range(_READ_ATTEMPTS):
            self._stamp = manifest_stamp(self.path)
            manifest = read_manifest(self.path)
            if manifest is None:
                manifest = self._create(vocab_size, fingerprint, create)
            check_same_tokenizer(self.path, manifest, vocab_size, fingerprint)
            if fingerprint and not manifest.tokenizer_fingerprint:
                manifest = replace(manifest, tokenizer_fingerprint=fingerprint)
            self.manifest = manifest
            self.files = tuple(self._map(entry) for entry in manifest.files)
            # A reader may have been overtaken by the writer, who removed what it replaced.
            if not (self.read_only and self.problems) or attempt == _READ_ATTEMPTS - 1:
                break
        if not self.read_only:
            remove_temporaries(self.path)
            self._remove_unnamed()
        for problem in self.problems:
            logger.error("The datastore leaves a sub-index out: %s", problem)

    def is_overtaken(self) -> bool:
        """Whether the writer of a read-only folder has changed something since it was opened."""
        return manifest_stamp(self.path) != self._stamp

    def follow(self) -> bool:
        """Takes in what the writer of a read-only folder has changed; False: nothing.

        Raises DatastoreError: the manifest is damaged, or that of another tokenizer now; what was
        there before is served on.
        """
        stamp = manifest_stamp(self.path)
        if stamp is None or stamp == self._stamp:
            return False
        manifest = read_manifest(self.path)
        if manifest is None:
            return False
        mine = self.manifest
        check_same_tokenizer(self.path, manifest, mine.vocab_size, mine.tokenizer_fingerprint)
        known = {file.entry: file for file in self.files}
        files = tuple(known.get(entry) or self._map(entry) for entry in manifest.files)
        new = [file for file in files if file.problem is not None and file.entry not in known]
        if any(not os.path.exists(self.file_path(file.entry.name)) for file in new):
            return False  # overtaken by the writer: there is a newer manifest
        for file in new:
            logger.error("The datastore leaves a sub-index out: %s", file.problem)
        with self._changing:
            self.manifest, self.files, self._stamp = manifest, files, stamp
        return True

    def _create(self, vocab_size: int | None, fingerprint: str | None, create: bool) -> Manifest:
        if self.read_only or not create or vocab_size is None:
            raise DatastoreError(f"{self.path} is not a datastore: it has no MANIFEST")
        strange = [name for name in os.listdir(self.path) if name != "LOCK"]
        if any(not name.startswith(".tmp-MANIFEST") for name in strange):
            raise DatastoreError(
                f"{self.path} is not a datastore and not empty (it holds {strange[0]!r}): name "
                "another folder"
            )
        manifest = Manifest(vocab_size, fingerprint or "")
        write_manifest(self.path, manifest)
        return manifest

    def _map(self, entry: FileEntry) -> SubIndexFile:
        try:
            container = read_container(
                self.file_path(entry.name),
                self.manifest.vocab_size,
                self.manifest.tokenizer_fingerprint,
            )
            _check_entry(self.file_path(entry.name), entry, container)
        except DatastoreError as error:
            return SubIndexFile(entry, (), str(error))
        return SubIndexFile(entry, container.segments)

    def _remove_unnamed(self) -> None:
        named = {file.entry.name for file in self.files}
        for name in os.listdir(self.path):
            log = log_name(name)
            old_log = log is not None and not self.manifest.counts(log)
            unnamed = name.startswith("sub-") and name not in named | self._given_names
            if (old_log or unnamed) and not remove_if_file(self.file_path(name)):
                logger.warning("%s cannot be removed: remove it by hand", self.file_path(name))

    @property
    def problems(self) -> list[str]:
        """Why files are left out."""
        return [file.problem for file in self.files if file.problem is not None]

    @property
    def live_files(self) -> list[SubIndexFile]:
        """Files of served outputs, oldest first."""
        return [file for file in self.files if file.entry.corpus is None]

    def corpora(self, finished: bool = True) -> dict[str, tuple[Segment, ...]]:
        """The segments of each named corpus, of those that are finished (or are not)."""
        found: dict[str, tuple[Segment, ...]] = {}
        for file in self.files:
            name = file.entry.corpus
            if name is not None and (name not in self.manifest.building) == finished:
                found[name] = found.get(name, ()) + tuple(s for _, s in file.segments)
        return found

    def file_path(self, name: str) -> str:
        return os.path.join(self.path, name)

    def new_file_name(self) -> str:
        """A name that no other process may come upon, not even one left over from a kill."""
        with self._changing:
            number = self.manifest.next_file
            self.manifest = replace(self.manifest, next_file=number + 1)
            name = f"sub-{number:08d}-{secrets.token_hex(4)}.idx"
            self._given_names.add(name)
        return name

    def discard(self, name: str) -> None:
        """Removes whatever was written of a file that was not published."""
        remove_temporaries(self.path, name)
        remove_if_file(self.file_path(name))
        with self._changing:
            self._given_names.discard(name)

    def publish(
        self,
        *,
        add: Sequence[FileEntry] = (),
        remove: Sequence[SubIndexFile] = (),
        **changes: Any,
    ) -> bool:
        """Takes files in and out, in one step; what is added takes the place of what is removed.

        changes: other fields of the manifest. Returns False, with the added files unlinked, if a
        file to be removed has gone meanwhile. DatastoreError, and nothing has changed, if the
        manifest cannot be written.
        """
        with self._changing:
            if any(file not in self.files for file in remove):
                for entry in add:
                    remove_if_file(self.file_path(entry.name))
                return False
            added = [self._map(entry) for entry in add]
            place = self.files.index(remove[0]) if remove else len(self.files)
            before = [file for file in self.files[:place] if file not in remove]
            after = [file for file in self.files[place:] if file not in remove]
            files = (*before, *added, *after)
            entries = tuple(file.entry for file in files)
            manifest = replace(self.manifest, files=entries, **changes)
            try:
                write_manifest(self.path, manifest)
                self._unsynced = False
            except NotSynced as error:
                # It counts; what it no longer names stays until no power cut can undo that.
                logger.error("The datastore's manifest is not on the disk yet: %s", error)
                self._unsynced = True
            self.manifest, self.files = manifest, files
            self._given_names -= {entry.name for entry in add}
        self.unlink(*(self.file_path(file.entry.name) for file in remove))
        self.on_change()
        return True

    def unlink(self, *paths: str) -> None:
        """Removes files that no manifest names; what cannot be is left to remove_leftovers()."""
        with self._changing:
            self._leftovers.update(paths)
            if not self._unsynced:
                self._leftovers = {path for path in self._leftovers if not _unlinked(path)}

    def remove_leftovers(self) -> None:
        """Returns when no unlinked file is left, on the disk itself; DatastoreError: one is."""
        with self._changing:
            if self._unsynced:
                # Syncing again proves nothing after a failure: another file, another name.
                write_manifest(self.path, self.manifest)
                self._unsynced = False
            self.unlink()
            self._remove_unnamed()  # of a writer that was killed, whose folding ended after it
            if self._leftovers:
                raise DatastoreError(f"cannot remove {min(self._leftovers)}: remove it by hand")
            try:
                sync_folder(self.path)
            except OSError as error:
                self._unsynced = True
                raise DatastoreError(
                    f"cannot sync {self.path}: {error.strerror or error}"
                ) from None

    def disk_bytes(self) -> int:
        """Bytes of all files of the folder."""
        total = 0
        for name in os.listdir(self.path):
            try:
                total += os.lstat(self.file_path(name)).st_size
            except FileNotFoundError:
                continue
        return total

    def log_names(self) -> list[LogName]:
        """The logs that count, each member's in their order."""
        try:
            found = [log_name(name) for name in os.listdir(self.path)]
        except OSError as error:
            raise DatastoreError(f"cannot read {self.path}: {error.strerror or error}") from None
        counting = [log for log in found if log is not None and self.manifest.counts(log)]
        for log in counting:
            if log.number >= FILE_NUMBER_LIMIT:
                raise DatastoreError(
                    f"{self.log_path(log)} was not written by a datastore, which counts its logs "
                    "from 1 on: remove it"
                )
        return sorted(counting, key=lambda log: log.place)

    def log_path(self, log: LogName) -> str:
        return self.file_path(log.file)

    def close(self) -> None:
        """Gives the lock back."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def check_folder_owner(path: str) -> None:
    """DatastoreError unless it is a folder of this user's that not everybody may write to."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise DatastoreError(f"cannot read datastore {path}: {error.strerror or error}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise DatastoreError(f"datastore {path} must be a folder, and is a file")
    check_owner(path, found)


def _check_entry(path: str, entry: FileEntry, container: Container) -> None:
    """DatastoreError unless a file holds what the manifest says."""
    tokens = sum(segment.num_tokens for _, segment in container.segments)
    if tokens != entry.tokens:
        raise DatastoreError(
            f"sub-index {path} holds {tokens} tokens, and the MANIFEST says {entry.tokens}"
        )
    owners = {owner for owner, _ in container.segments}
    if entry.corpus is not None and owners != {entry.corpus}:
        raise DatastoreError(
            f"sub-index {path} holds {min(owners)!r}, and the MANIFEST says {entry.corpus!r}"
        )


def _unlinked(path: str) -> bool:
    try:
        remove_file(path)
    except OSError as error:
        logger.error("%s cannot be removed yet: %s", path, error.strerror or error)
        return False
    return True
