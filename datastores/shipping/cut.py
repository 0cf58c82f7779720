"""A datastore's folder as of one moment, while a server may be writing to it.

Sub-index files never change and logs only grow, so open files and the records that the logs held
are all it takes; nothing is asked of the server, and nothing of it waits. What a deletion has taken
is not in a cut, even where a file of the folder still has it. `has_lost()` tells whether something
has been deleted since: then what was copied of the cut has to be copied anew.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike, fspath
from typing import BinaryIO

import numpy as np

from ..config import DatastoreError
from ..container import Container, map_container
from ..corpus_names import namespace_and_name
from ..files import open_file
from ..folder import check_folder_owner
from ..live import MAX_SEGMENT_TOKENS, apply_deletion
from ..log_names import log_name
from ..logs import by_namespace
from ..manifest import FileEntry, Manifest, manifest_stamp, read_manifest
from ..segment import DOCUMENT_DTYPE, Document, Segment, build_segments
from ..wal import Deletion, read_log

_ATTEMPTS = 50
_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)


@dataclass(eq=False)
class CutFile:
    """A sub-index file of a cut, held open: it can be read when its writer has removed it."""

    entry: FileEntry
    file: BinaryIO
    path: str
    manifest: Manifest

    @cached_property
    def container(self) -> Container:
        """Its content, all of it checked. DatastoreError if it is damaged."""
        found = map_container(
            self.file, self.path, self.manifest.vocab_size, self.manifest.tokenizer_fingerprint
        )
        if sum(s.num_tokens for _, s in found.segments) != self.entry.tokens:
            raise DatastoreError(f"sub-index {self.path} does not hold what the MANIFEST says")
        return found

    @cached_property
    def problem(self) -> str | None:
        """Why it cannot be read; None: it can."""
        try:
            _ = self.container
        except DatastoreError as error:
            return str(error)
        return None

    def is_taken_from(self, deletions: Iterable[Deletion]) -> bool:
        """Whether any of these takes something that it holds."""
        return any(
            deletion.concerns(owner) and deletion.takes(segment.documents).any()
            for deletion in deletions
            for owner, segment in self.container.segments
        )


class Cut:
    """What counts in a folder at one moment. Close it, or use it in a `with` block."""

    def __init__(self, path: str | PathLike[str]) -> None:
        """Takes it. Raises DatastoreError: there is no datastore, or its manifest is damaged."""
        self.path = os.path.abspath(fspath(path))
        self.manifest: Manifest
        self.files: list[CutFile] = []
        """Of served outputs and of corpora that are finished, oldest first."""
        self.documents: list[tuple[str, Document]] = []
        """(namespace, document) of those that were in logs only."""
        self.deletions: list[Deletion] = []
        """Those that stood in the logs."""
        self.next_number = 0
        """Documents that come get this number or more."""
        check_folder_owner(self.path)
        for _ in range(_ATTEMPTS):
            stamp = manifest_stamp(self.path)
            try:
                self._take()
            except (FileNotFoundError, DatastoreError):
                self.close()
                if stamp is None or stamp == manifest_stamp(self.path):
                    raise
                continue
            if stamp == manifest_stamp(self.path):
                return
            self.close()
        raise DatastoreError(f"datastore {self.path} changes too often to be copied: try again")

    def _take(self) -> None:
        manifest = read_manifest(self.path)
        if manifest is None:
            raise DatastoreError(f"{self.path} is not a datastore: it has no MANIFEST")
        self.manifest = manifest
        self.documents, self.deletions = [], []
        for entry in manifest.files:
            path = os.path.join(self.path, entry.name)
            if entry.corpus not in manifest.building:
                try:
                    file = open_file(path)
                except FileNotFoundError:
                    raise DatastoreError(f"there is no sub-index file {path}") from None
                self.files.append(CutFile(entry, file, path, manifest))
        last = manifest.next_number - 1
        # Each server's last one grows; what it holds now is what came first, whatever follows. A
        # deletion that comes in between, has_lost() of the next cut tells.
        for log in self._logs(manifest):
            content = read_log(log, manifest.vocab_size, manifest.tokenizer_fingerprint)
            self.documents += content.documents
            self.deletions += content.deletions
            last = max(last, content.last_number)
        self.next_number = last + 1

    def _logs(self, manifest: Manifest) -> list[str]:
        found = filter(None, map(log_name, os.listdir(self.path)))
        counting = sorted(filter(manifest.counts, found), key=lambda log: log.place)
        return [os.path.join(self.path, log.file) for log in counting]

    def check_aside(self) -> threading.Thread:
        """Checks all files in a thread; `problems` waits for nothing once that has ended."""
        thread = threading.Thread(target=lambda: self.problems, daemon=True)
        thread.start()
        return thread

    @property
    def problems(self) -> list[str]:
        """Sub-index files that cannot be read, and why; a cut leaves them out."""
        return [file.problem for file in self.files if file.problem is not None]

    @property
    def damaged(self) -> set[str]:
        """The names of these files."""
        return {file.entry.name for file in self.files if file.problem is not None}

    def is_whole(self, file: CutFile) -> bool:
        """Whether all that an intact file holds still counts."""
        # Most often there are none; then it need not be read.
        served = file.entry.corpus is None and bool(self.deletions)
        return not served or not file.is_taken_from(self.deletions)

    def remaining(self, file: CutFile) -> list[tuple[str, Segment]]:
        """(owner, segment) of what deletions have left of an intact file."""
        left: list[tuple[str, Segment]] = []
        for owner, segment in file.container.segments:
            segments: Sequence[Segment] = (segment,)
            if file.entry.corpus is None:
                segments = self._without_deleted(owner, segments)
            left += [(owner, each) for each in segments]
        return left

    @cached_property
    def fresh_documents(self) -> list[tuple[str, Document]]:
        """(namespace, document) of what is in no file yet."""
        return [
            (namespace, document)
            for namespace, document in self.documents
            if not any(d.takes_document(namespace, document) for d in self.deletions)
        ]

    @cached_property
    def fresh(self) -> list[tuple[str, Segment]]:
        """(namespace, segment) of these, sorted when it is asked for."""
        return [
            (namespace, segment)
            for namespace, documents in by_namespace(self.fresh_documents).items()
            for segment in build_segments(documents, self.manifest.vocab_size, MAX_SEGMENT_TOKENS)
        ]

    def segments(self) -> Iterator[tuple[str, str | None, Segment]]:
        """(owner, corpus or None, segment) of all that counts, oldest first."""
        for file in self.files:
            if file.problem is None:
                yield from ((owner, file.entry.corpus, s) for owner, s in self.remaining(file))
        yield from ((namespace, None, segment) for namespace, segment in self.fresh)

    def _without_deleted(self, owner: str, segments: Sequence[Segment]) -> Sequence[Segment]:
        for deletion in self.deletions:
            if deletion.concerns(owner):
                segments = apply_deletion(deletion, segments, self.manifest.vocab_size)
        return segments

    def has_lost(self, since: "Cut", wanted: Callable[[FileEntry], bool]) -> bool:
        """Whether something of `since`, an earlier cut, counts no more: deleted, or evicted.

        wanted: of which of its files it matters; that of a nameless entry: of what logs held.
        """
        names = {file.entry.name for file in self.files}
        cared = [f for f in since.files if f.problem is None and wanted(f.entry)]
        replaced = [file for file in cared if file.entry.name not in names]
        if any(file.entry.corpus is not None for file in replaced):
            return True
        known = set(since.deletions)
        new = [deletion for deletion in self.deletions if deletion not in known]
        served = [file for file in cared if file.entry.corpus is None]
        if new and any(f.is_taken_from(new) for f in served if f.entry.name in names):
            return True
        before = _of_segments(pair for file in replaced for pair in since.remaining(file))
        if wanted(FileEntry("", 0)):
            before |= _of_documents(since.fresh_documents)
        if not before:
            return False
        known_names = {file.entry.name for file in since.files}
        after = [
            pair
            for file in self.files
            if file.entry.corpus is None and file.entry.name not in known_names
            if file.problem is None
            for pair in self.remaining(file)
        ]
        return not before <= _of_segments(after) | _of_documents(self.fresh_documents)

    def close(self) -> None:
        for file in self.files:
            with contextlib.suppress(OSError):
                file.file.close()
        self.files = []

    def __enter__(self) -> "Cut":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def is_shared_corpus(entry: FileEntry) -> bool:
    """Whether a file holds a corpus that everybody drafts from, and so nothing of a tenant."""
    return entry.corpus is not None and namespace_and_name(entry.corpus)[0] is None


def _of_segments(pairs: Iterable[tuple[str, Segment]]) -> set[tuple[str, int]]:
    """(namespace, number and digest mixed) of each document."""
    found: set[tuple[str, int]] = set()
    for owner, segment in pairs:
        found.update((owner, key) for key in _mixed(segment.documents))
    return found


def _of_documents(documents: Iterable[tuple[str, Document]]) -> set[tuple[str, int]]:
    """The same of documents that are in no segment."""
    pairs = list(documents)
    rows = np.empty(len(pairs), DOCUMENT_DTYPE)
    for i, (_, document) in enumerate(pairs):
        rows[i] = 0, document.number, document.digest
    return set(zip((name for name, _ in pairs), _mixed(rows), strict=True))


def _mixed(documents: np.ndarray) -> list[int]:
    digests = np.ascontiguousarray(documents["digest"]).view(np.uint64).reshape(-1, 2)
    columns = np.column_stack((documents["number"], digests)).astype(np.uint64)
    return (columns * _MIX).sum(axis=1).tolist()
