"""The datastore: served outputs by namespace and shared corpora, searchable while it grows."""

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, TypeVar

import numpy as np

from .config import DatastoreClosed, DatastoreError, DatastoreInUse
from .container import Container, write_container
from .corpus_names import corpus_key, may_read, namespace_and_name, shown_name
from .durable import DurableCollection, DurableOptions
from .folder import Folder
from .following import FollowingCollection
from .input_trie import as_token_ids
from .live import MAX_SEGMENT_TOKENS, SEGMENTS_PER_COLLECTION
from .logs import LogOptions
from .manifest import MAX_VOCAB_SIZE, FileEntry, is_name, manifest_stamp
from .memory import MemoryCollection
from .segment import (
    MAX_NAME_BYTES,
    Document,
    Segment,
    Snapshot,
    build_segments,
    document_digest,
)
from .served_outputs import ServedOutputs

logger = logging.getLogger(__name__)

DEFAULT_NAMESPACE = "default"
MEMORY_TOKENS = 1 << 23
DISK_TOKENS = SEGMENTS_PER_COLLECTION * MAX_SEGMENT_TOKENS
# What the first of several processes takes to make a folder that the others wait for.
_CREATION_SECONDS = 10.0
_READ_ATTEMPTS = 20
# Namespaces whose snapshots are kept until something changes.
_MOST_SNAPSHOTS = 1024

TokenIds = Sequence[int] | np.ndarray
_T = TypeVar("_T")


@dataclass(frozen=True)
class DatastoreInfo:
    """State of a datastore at one moment. Tokens and documents exclude what is still queued."""

    path: str | None
    """The folder; None: in memory only."""
    follows: bool
    """Whether another process folds, and this one is a member beside it."""
    vocab_size: int
    tokenizer_fingerprint: str
    max_tokens: int
    """Most tokens of served outputs; the oldest sub-index is dropped beyond."""
    num_tokens: int
    num_documents: int
    sub_indices: int
    corpora: dict[str, int]
    """Tokens by corpus, one of a namespace under NAMESPACE/NAME."""
    namespaces: dict[str, int]
    """Tokens of served outputs by namespace."""
    building: tuple[str, ...]
    """Corpora that a builder has not finished; they are not served."""
    nbytes: int
    """Bytes of all that is searchable, mapped files included."""
    bytes_per_token: float
    disk_bytes: int
    queued_documents: int
    queued_tokens: int
    """On their way to be searchable."""
    unfolded_tokens: int
    """In logs, not in sub-index files yet."""
    ingest_lag: float
    """Seconds since the oldest queued document came."""
    dropped_documents: int
    """Not taken in, because there was no room or the disk failed."""
    evicted_tokens: int
    """Dropped, oldest first, to stay within max_tokens."""
    problems: tuple[str, ...]
    """Sub-index files that are left out, and why."""
    pending_deletions: int = 0
    """Deletions that searches follow already, and some file does not yet."""
    background_failures: int = 0
    """Attempts to write files that failed; each is made again."""
    background_error: str | None = None
    """What the last one failed with; None: it did not."""
    role: str = "alone"
    """alone; or in a fleet: writer (it folds everybody's logs) or member."""
    folded_logs: int = 0
    """Logs that this process has turned into files."""
    elections: int = 0
    """How often this process took the place of a writer that had ended."""


class Datastore:
    """Documents of token ids whose parts can be found by what precedes them. Thread-safe.

    A search reads the shared corpora, and the corpora and served outputs of one namespace, in a
    snapshot that never changes; it waits for nobody. What add() brings is searchable within a
    fraction of a second. With a folder (open()), it is in a log before add() returns, and in
    sub-index files later, written by a background process.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        tokenizer_fingerprint: str = "",
        max_tokens: int = MEMORY_TOKENS,
        max_corpus_tokens: int = DISK_TOKENS,
        live_buffer_tokens: int = 1 << 20,
        live_interval: float = 0.05,
        live_share: float = 1.0,
        folder: Folder | None = None,
        fold_tokens: int = 1 << 20,
        fold_interval: float = 300.0,
        follow: bool = False,
        shared: bool = False,
    ) -> None:
        """A datastore in memory; open() gives one in a folder.

        vocab_size: ids are 0..vocab_size - 1. tokenizer_fingerprint: any text that identifies the
        tokenizer. max_tokens: most tokens of served outputs, max_corpus_tokens: of all corpora
        (about 6.2 bytes each with a vocabulary up to 65,535, else 8.2). live_buffer_tokens: most
        tokens that wait to be sorted; a document that finds the buffer full is dropped and
        counted. live_interval: seconds for which new documents are gathered before they are
        sorted together. live_share: of what other namespaces leave of the buffer, and of the logs,
        as much may be one namespace's, above 0 to 1. folder, fold_tokens, fold_interval, follow,
        shared: see open().
        """
        self.vocab_size = _whole("vocab_size", vocab_size, 1, MAX_VOCAB_SIZE)
        self.tokenizer_fingerprint = str(tokenizer_fingerprint)
        self.max_tokens = _whole("max_tokens", max_tokens, 1, 1 << 40)
        self.max_corpus_tokens = _whole("max_corpus_tokens", max_corpus_tokens, 1, 1 << 40)
        self._folder = folder
        self._lock = threading.Lock()  # for _corpora, _dropped
        self._dropped = 0
        self._snapshots: dict[tuple[str, frozenset[str] | None], Snapshot] = {}
        self._corpora: dict[str, tuple[Segment, ...]] = {}
        logs = LogOptions(
            _whole("live_buffer_tokens", live_buffer_tokens, 1, 1 << 30),
            _seconds("live_interval", live_interval),
            share=_part("live_share", live_share),
        )
        self._options = DurableOptions(
            self.max_tokens,
            logs,
            _whole("fold_tokens", fold_tokens, 1, 1 << 30),
            _seconds("fold_interval", fold_interval),
        )
        self._shared = shared
        self._elections = 0
        self._served = self._open_served(follow)
        self._refresh()
        if isinstance(self._served, FollowingCollection):
            self._served.start()

    def _open_served(self, follow: bool) -> ServedOutputs:
        """What keeps the served outputs, by whether there is a folder and who writes to it."""
        logs, max_tokens, folder = self._options.logs, self.max_tokens, self._folder
        if folder is None:
            return MemoryCollection(
                self.vocab_size, max_tokens, logs.buffer_tokens, logs.interval, self._refresh,
                logs.share,
            )  # fmt: skip
        if follow:
            return FollowingCollection(folder, self._options, self._refresh, self._take_over)
        durable = DurableCollection(folder, self._options, self._refresh, self._shared)
        folder.on_change = self._refresh
        return durable

    @classmethod
    def open(
        cls,
        path: str | PathLike[str],
        *,
        vocab_size: int | None = None,
        tokenizer_fingerprint: str | None = None,
        create: bool = True,
        read_only: bool = False,
        shared: bool = False,
        max_tokens: int = DISK_TOKENS,
        max_corpus_tokens: int = DISK_TOKENS,
        live_buffer_tokens: int = 1 << 20,
        live_interval: float = 0.05,
        live_share: float = 1.0,
        fold_tokens: int = 1 << 20,
        fold_interval: float = 300.0,
    ) -> "Datastore":
        """Opens the datastore in a folder, or creates it (create; vocab_size must be given).

        Everything in it is checked. Sub-indices that are damaged are left out and named in
        info().problems. read_only: beside a process that writes to it; shows what is there now.
        shared: several processes open it so, a fleet. Each takes in what it is given, and finds
        what the others take in about half a second later. The first one folds for all; when it
        ends, one of the others takes its place.
        fold_tokens, fold_interval (seconds): a log of so many tokens, or so old, becomes a
        sub-index. Other options as in __init__.

        Raises DatastoreError: it is missing, in use by another process, its manifest is damaged,
        or it was built for another vocabulary size or tokenizer than those given.
        """
        kept: dict[str, Any] = {
            "max_tokens": max_tokens, "max_corpus_tokens": max_corpus_tokens,
            "live_buffer_tokens": live_buffer_tokens, "live_interval": live_interval,
            "live_share": live_share, "fold_tokens": fold_tokens, "fold_interval": fold_interval,
            "shared": shared,
        }  # fmt: skip
        for attempt in range(_READ_ATTEMPTS):
            folder = (_open_shared if shared else Folder)(
                os.fspath(path), vocab_size=vocab_size, create=create, read_only=read_only,
                tokenizer_fingerprint=tokenizer_fingerprint,
            )  # fmt: skip
            store = cls._on(folder, kept, read_only and attempt < _READ_ATTEMPTS - 1)
            if store is not None:
                return store
        raise AssertionError("unreachable")

    @classmethod
    def _on(cls, folder: Folder, kept: dict[str, Any], may_retry: bool) -> "Datastore | None":
        """The datastore of a folder; None, if that is allowed: its writer has overtaken us.

        A log may have been folded between our looks at the manifest and at the logs.
        """
        try:
            store = cls(
                folder.manifest.vocab_size,
                tokenizer_fingerprint=folder.manifest.tokenizer_fingerprint,
                folder=folder,
                follow=kept["shared"] and folder.read_only,
                **kept,
            )
        except BaseException as error:
            folder.close()
            if may_retry and isinstance(error, DatastoreError) and folder.is_overtaken():
                return None
            raise
        if may_retry and folder.is_overtaken():
            store.close()
            return None
        return store

    @property
    def follows(self) -> bool:
        """Whether another process folds: then corpora and fold() are its business."""
        return isinstance(self._served, FollowingCollection)

    @property
    def role(self) -> str:
        """alone; or in a fleet: writer (it folds everybody's logs) or member."""
        return "member" if self.follows else "writer" if self._shared else "alone"

    # -- served outputs --------------------------------------------------------------------

    def add(self, tokens: TokenIds, namespace: str = DEFAULT_NAMESPACE, name: str = "") -> bool:
        """Takes in one document, a finished output, for searches of its namespace only.

        name: under which delete_document() finds it, a request's id. Returns at once: True when
        it is in the log (with a folder) and on its way to be searchable; False if it is dropped,
        because there is no room, for all or for its namespace, or the disk failed.
        """
        document = self._checked(tokens).copy()
        if not document.size:
            return True
        check_name("namespace", namespace)
        digest = document_digest(name)
        taken = self._of_served(lambda served: served.add(namespace, document, digest))
        if not taken:
            with self._lock:
                self._dropped += 1
        return taken

    def _of_served(self, call: Callable[[ServedOutputs], _T]) -> _T:
        """What a call gives, of what this process is now: a member may have become the writer."""
        while True:
            served = self._served
            try:
                return call(served)
            except DatastoreClosed:
                if served is self._served:
                    raise

    def flush(self, timeout: float | None = None) -> None:
        """Waits until all that was added before is searchable.

        Raises TimeoutError after `timeout` seconds.
        """
        self._served.flush(timeout)

    def fold(self, timeout: float | None = None) -> None:
        """Waits until all that was added before is in sub-index files, and these are merged.

        Raises TimeoutError after `timeout` seconds.
        """
        self._served.fold(timeout)

    def delete_namespace(self, namespace: str) -> int:
        """Removes a namespace's documents and corpora from memory and disk; returns their tokens.

        Raises DeletionPending if a file cannot be rewritten, or not within 50 seconds; searches
        find nothing all the same, and it is tried again until it can, also after a restart.
        """
        check_name("namespace", namespace)
        corpora = self._all_corpora()
        bound = [k for k in corpora if namespace_and_name(k)[0] == namespace]
        if self.follows:  # the one that folds removes them
            tokens = sum(s.num_tokens for key in bound for s in corpora[key])
        else:
            tokens = sum(self._remove_corpus(key) for key in bound)
        return tokens + self._of_served(lambda served: served.delete(namespace, None))

    def delete_document(self, name: str, namespace: str | None = None) -> int:
        """Removes what was added under a name, in one namespace or all; as delete_namespace()."""
        if not isinstance(name, str) or not name:
            raise DatastoreError(f"name must be a text, and not empty, got {str(name)[:80]!r}")
        if namespace is not None:
            check_name("namespace", namespace)
        digest = document_digest(name)
        return self._of_served(lambda served: served.delete(namespace, digest))

    def namespaces(self) -> dict[str, int]:
        """Tokens of served outputs by namespace."""
        return self._served.namespaces()

    def close(self) -> None:
        """Ends the background work and gives the folder back; searches still work."""
        served = self._served
        served.close()
        if served is not self._served:  # which had just become the writer
            self._served.close()
        if self._folder is not None:
            self._folder.close()

    def __enter__(self) -> "Datastore":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- corpora ---------------------------------------------------------------------------

    def add_corpus(
        self, name: str, documents: Iterable[TokenIds], namespace: str | None = None
    ) -> int:
        """Builds a corpus in the calling thread; searchable as a whole, and kept, on return.

        namespace: the only one that reads it, and with which it is deleted; None: all read it.
        Returns its number of tokens. Raises DatastoreError if the name is taken, a document is
        invalid, there is no text, all corpora would exceed max_corpus_tokens, or the file cannot
        be written. For large ones see CorpusBuilder.
        """
        check_name("corpus", name)
        if namespace is not None:
            check_name("namespace", namespace)
        try:
            key = corpus_key(name, namespace)
        except ValueError as error:
            raise DatastoreError(str(error)) from None
        check_name("corpus", key)
        self._check_writable()
        self._check_new_corpus(key, 0)
        segments: list[Segment] = []
        total = 0
        checked = (Document(tokens) for tokens in self._checked_each(documents))
        for segment in build_segments(checked, self.vocab_size, MAX_SEGMENT_TOKENS):
            segments.append(segment)
            total += segment.num_tokens
            self._check_new_corpus(key, total)
        if not segments:
            raise DatastoreError(f"corpus {name!r} holds no tokens")
        with self._lock:
            self._check_new_corpus(key, total)  # others may have come meanwhile
            if self._folder is None:
                self._corpora = {**self._corpora, key: tuple(segments)}
            else:
                self._write_corpus(self._folder, key, segments)
        self._refresh()
        return total

    def _write_corpus(self, folder: Folder, key: str, segments: list[Segment]) -> None:
        entries = []
        for segment in segments:
            file = folder.new_file_name()
            content = Container(self.vocab_size, self.tokenizer_fingerprint, ((key, segment),))
            write_container(folder.file_path(file), content)
            entries.append(FileEntry(file, segment.num_tokens, key))
        folder.publish(add=entries)

    def remove_corpus(self, name: str) -> None:
        """Removes a corpus from memory and disk, by the name that list_corpora() has; raises
        DatastoreError if there is none of the name."""
        self._check_writable()
        keys = {shown_name(key): key for key in self._all_corpora()}
        if name not in keys:
            known = ", ".join(map(repr, keys)) or "none"
            raise DatastoreError(f"there is no corpus {name!r}; there are: {known}")
        self._remove_corpus(keys[name])

    def _remove_corpus(self, key: str) -> int:
        self._check_writable()
        with self._lock:
            tokens = sum(s.num_tokens for s in self._all_corpora().get(key, ()))
            if self._folder is None:
                self._corpora = {k: v for k, v in self._corpora.items() if k != key}
            else:
                gone = [file for file in self._folder.files if file.entry.corpus == key]
                building = {**self._folder.manifest.building}
                building.pop(key, None)
                self._folder.publish(remove=gone, building=building)
        self._refresh()
        return tokens

    def list_corpora(self) -> dict[str, int]:
        """Tokens of each corpus, one of a namespace under NAMESPACE/NAME."""
        corpora = self._all_corpora()
        return {
            shown_name(k): sum(s.num_tokens for s in segments) for k, segments in corpora.items()
        }

    def corpus_names(self) -> list[tuple[str | None, str]]:
        """Each corpus's namespace (None: everybody reads it) and name."""
        return [namespace_and_name(key) for key in self._all_corpora()]

    def _all_corpora(self) -> dict[str, tuple[Segment, ...]]:
        return self._corpora if self._folder is None else self._folder.corpora()

    def _check_new_corpus(self, key: str, tokens: int) -> None:
        name = shown_name(key)
        taken = name in map(shown_name, self._all_corpora())
        if self._folder is not None:
            taken |= any(file.entry.corpus == key for file in self._folder.files)
        if taken:
            raise DatastoreError(f"corpus {name!r} exists already; remove it first")
        total = tokens + sum(self.list_corpora().values())
        if total > self.max_corpus_tokens:
            raise DatastoreError(
                f"corpus {name!r} does not fit: {total} tokens with the other corpora, "
                f"max_corpus_tokens is {self.max_corpus_tokens}"
            )

    # -- reading ---------------------------------------------------------------------------

    def snapshot(
        self, namespace: str = DEFAULT_NAMESPACE, corpora: Collection[str] | None = None
    ) -> Snapshot:
        """What a request of a namespace may read now; never changes afterwards.

        corpora: names of those that it wants, of the shared ones and its namespace's; None: all.
        """
        known = self._snapshots  # replaced whenever anything changes
        chosen = None if corpora is None else frozenset(corpora)
        found = known.get((namespace, chosen))
        if found is None:
            read = (v for k, v in self._all_corpora().items() if may_read(k, namespace, chosen))
            static = tuple(s for segments in read for s in segments)
            found = Snapshot(self._served.segments_of(namespace), static, self.vocab_size)
            if len(known) >= _MOST_SNAPSHOTS:  # while nothing changes, anybody may name new ones
                known.clear()
            known[namespace, chosen] = found
        return found

    def info(self) -> DatastoreInfo:
        """Sizes and counters."""
        namespaces, corpora = self.namespaces(), self._all_corpora()
        live = [s for name in namespaces for s in self._served.segments_of(name)]
        segments = [*live, *(s for group in corpora.values() for s in group)]
        tokens = sum(s.num_tokens for s in segments)
        nbytes = sum(s.nbytes for s in segments)
        folder, counters = self._folder, self._served.counters()
        return DatastoreInfo(
            path=None if folder is None else folder.path,
            follows=self.follows,
            vocab_size=self.vocab_size,
            tokenizer_fingerprint=self.tokenizer_fingerprint,
            max_tokens=self.max_tokens,
            num_tokens=tokens,
            num_documents=sum(len(s.documents) for s in segments),
            sub_indices=len(segments),
            corpora=self.list_corpora(),
            namespaces=namespaces,
            building=() if folder is None else tuple(folder.manifest.building),
            nbytes=nbytes,
            bytes_per_token=nbytes / tokens if tokens else 0.0,
            disk_bytes=0 if folder is None else folder.disk_bytes(),
            queued_documents=int(counters["queued_documents"]),
            queued_tokens=int(counters["queued_tokens"]),
            unfolded_tokens=int(counters["unfolded_tokens"]),
            ingest_lag=counters["ingest_lag"],
            dropped_documents=self._dropped,
            evicted_tokens=int(counters["evicted_tokens"]),
            problems=() if folder is None else tuple(folder.problems),
            pending_deletions=int(counters.get("pending_deletions", 0)),
            background_failures=int(counters.get("background_failures", 0)),
            background_error=self._served.background_error,
            role=self.role,
            folded_logs=int(counters.get("folded_logs", 0)),
            elections=self._elections,
        )

    @property
    def num_tokens(self) -> int:
        """Searchable tokens of all namespaces and corpora."""
        return sum(self.namespaces().values()) + sum(self.list_corpora().values())

    # -- internals -------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Makes later searches see the present state."""
        self._snapshots = {}

    def _take_over(self) -> bool:
        """Become the writer if there is none any more; called by the thread that follows."""
        following = self._folder
        assert following is not None
        try:
            folder = Folder(
                following.path,
                vocab_size=self.vocab_size,
                tokenizer_fingerprint=self.tokenizer_fingerprint,
                create=False,
                read_only=False,
            )
        except DatastoreInUse:
            return False
        try:
            served = DurableCollection(folder, self._options, self._refresh, shared=True)
        except BaseException:
            folder.close()
            raise
        folder.on_change = self._refresh
        with self._lock:
            self._folder, self._served = folder, served
            self._elections += 1
        self._refresh()
        logger.info("The datastore %s had no writer any more: now it is this process", folder.path)
        return True

    def _check_writable(self) -> None:
        if self.follows:
            raise DatastoreInUse(
                f"another process folds datastore {self._folder and self._folder.path}: corpora "
                "are added and removed there"
            )
        if self._folder is not None and self._folder.read_only:
            raise DatastoreError(f"datastore {self._folder.path} was opened to be read only")

    def _checked_each(self, documents: Iterable[TokenIds]) -> Iterator[np.ndarray]:
        for i, document in enumerate(documents):
            try:
                tokens = self._checked(document)
            except DatastoreError as error:
                raise DatastoreError(f"document {i}: {error}") from None
            if tokens.size:
                yield tokens

    def _checked(self, tokens: TokenIds) -> np.ndarray:
        return as_token_ids(tokens, self.vocab_size - 1)


def _open_shared(path: str, *, read_only: bool, **options: Any) -> Folder:
    """The folder, to be written to if no other process does so, else to be followed."""
    deadline = time.monotonic() + _CREATION_SECONDS
    while True:
        try:
            return Folder(path, read_only=False, **options)
        except DatastoreInUse:
            pass
        try:
            return Folder(path, read_only=True, **options)
        except DatastoreError:
            # The process that was first has not written the manifest yet.
            if manifest_stamp(path) is not None or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def check_name(what: str, name: str) -> None:
    """DatastoreError unless it can be the name of a namespace, a document or a corpus."""
    if not is_name(name) or "\0" in name:
        raise DatastoreError(
            f"{what} must be a text of 1 to {MAX_NAME_BYTES} bytes of UTF-8 without NUL, got "
            f"{str(name)[:80]!r}"
        )


def _whole(name: str, value: int, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise DatastoreError(f"{name} must be a whole number, got {value!r}")
    if not low <= value <= high:
        raise DatastoreError(f"{name} must be between {low} and {high}, got {value}")
    return int(value)


def _part(name: str, value: float) -> float:
    if not 0 < value <= 1:
        raise DatastoreError(f"{name} must be above 0 and at most 1, got {value!r}")
    return float(value)


def _seconds(name: str, value: float) -> float:
    if not 0 <= value <= 86400:
        raise DatastoreError(f"{name} must be between 0 and 86400 seconds, got {value!r}")
    return float(value)
