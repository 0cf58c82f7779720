"""The datastore: finished outputs and named corpora, searchable while it grows."""

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os import PathLike
from typing import Any

import numpy as np

from .config import DatastoreError
from .input_trie import as_token_ids
from .segment import Segment, Snapshot, build_segments, merge_in_slices, split_document
from .storage import StoredDatastore, read_datastore, write_datastore

logger = logging.getLogger(__name__)

MAX_VOCAB_SIZE = 1 << 30
_MAX_SEGMENT_TOKENS = 1 << 29
_SEGMENTS_PER_STORE = 8
# A segment is merged with its elder while the elder has no more than this many times its tokens:
# there are at most about log4(tokens) small ones beside the full ones.
_MERGE_RATIO = 4
_INLINE_MERGE_TOKENS = 1 << 16

TokenIds = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class DatastoreInfo:
    """State of a datastore at one moment. All counts exclude what is still queued."""

    vocab_size: int
    tokenizer_fingerprint: str
    num_tokens: int
    num_documents: int
    segment_tokens: tuple[int, ...]
    corpora: dict[str, int]
    nbytes: int
    bytes_per_token: float
    queued_documents: int
    queued_tokens: int
    dropped_documents: int
    """Documents refused because the queue was full."""
    evicted_tokens: int
    """Tokens dropped, oldest first, to stay within max_tokens."""


class Datastore:
    """Documents of token ids whose parts can be found by what precedes them. Thread-safe.

    What add() brings goes to the live collection: a background thread sorts small batches and
    merges them into larger sub-indices, and drops the oldest sub-index when max_tokens is
    exceeded. Named corpora are built at once by the caller's thread and stay until removed.
    Searches read an unchanging snapshot; they wait for nobody.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        tokenizer_fingerprint: str = "",
        max_tokens: int = 1 << 28,
        max_corpus_tokens: int = 1 << 28,
        live_buffer_tokens: int = 1 << 20,
        live_interval: float = 0.05,
    ) -> None:
        """
        vocab_size: ids are 0..vocab_size - 1. tokenizer_fingerprint: any text that identifies the
        tokenizer; a saved datastore is refused under another one. max_tokens: most tokens of the
        live collection (6 bytes each with a vocabulary up to 65,535, else 8); max_corpus_tokens:
        of all named corpora. live_buffer_tokens: most tokens that wait to be sorted; a document
        that finds the buffer full is dropped and counted. live_interval: seconds for which new
        documents are gathered before they are sorted together.
        """
        self.vocab_size = _whole("vocab_size", vocab_size, 1, MAX_VOCAB_SIZE)
        self.tokenizer_fingerprint = str(tokenizer_fingerprint)
        self.max_tokens = _whole("max_tokens", max_tokens, 1, 1 << 40)
        self.max_corpus_tokens = _whole("max_corpus_tokens", max_corpus_tokens, 1, 1 << 40)
        self.live_buffer_tokens = _whole("live_buffer_tokens", live_buffer_tokens, 1, 1 << 30)
        if not 0 <= live_interval <= 3600:
            raise DatastoreError(
                f"live_interval must be between 0 and 3600 seconds, got {live_interval!r}"
            )
        self.live_interval = float(live_interval)
        self._segment_tokens = min(
            _MAX_SEGMENT_TOKENS, max(1, self.max_tokens // _SEGMENTS_PER_STORE)
        )
        # One lock for all that follows; held for moments only, never while sorting or merging.
        self._changed = threading.Condition()
        self._queue: deque[np.ndarray] = deque()
        self._queued_tokens = 0
        self._generation = 0  # clear() raises it: what was taken before is not published
        self._batch_generation = 0
        self._in_merge: tuple[Segment, ...] = ()
        self._added = 0  # documents taken by add()
        self._published = 0  # of these, searchable or evicted
        self._dropped = 0
        self._evicted_tokens = 0
        self._flushing = 0
        self._live: tuple[Segment, ...] = ()
        self._corpora: dict[str, tuple[Segment, ...]] = {}
        self._snapshot = Snapshot((), self.vocab_size)
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failure: BaseException | None = None

    @classmethod
    def build(
        cls, documents: Iterable[TokenIds], vocab_size: int, **options: Any
    ) -> "Datastore":
        """A datastore whose live collection holds the documents; options as in __init__."""
        store = cls(vocab_size, **options)
        pieces = store._pieces(documents)
        for segment in build_segments(pieces, vocab_size, store._segment_tokens):
            with store._changed:
                store._publish(live=(*store._live, segment))
        return store

    # -- live ingest -----------------------------------------------------------------------

    def add(self, tokens: TokenIds) -> None:
        """Queues one document, a finished output; it becomes searchable in the background.

        Returns at once. Dropped (and counted in info()) if the queue is full.
        """
        document = self._checked(tokens).copy()
        if document.size == 0:
            return
        with self._changed:
            self._check_usable()
            if self._queued_tokens + document.size > self.live_buffer_tokens:
                if self._dropped == 0:
                    logger.warning(
                        "The datastore's queue is full (%d tokens): documents are dropped; "
                        "raise live_buffer_tokens",
                        self.live_buffer_tokens,
                    )
                self._dropped += 1
                return
            self._queue.append(document)
            self._queued_tokens += document.size
            self._added += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._ingest, name="datastore-ingest", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def flush(self, timeout: float | None = None) -> None:
        """Waits until all that was added before is searchable.

        Raises TimeoutError after `timeout` seconds.
        """
        with self._changed:
            goal = self._added
            self._flushing += 1
            self._changed.notify_all()
            try:
                done = self._changed.wait_for(
                    lambda: self._published >= goal or self._failure is not None, timeout
                )
            finally:
                self._flushing -= 1
            self._check_usable(closed_too=False)
            if not done:
                raise TimeoutError(
                    f"{goal - self._published} documents were not searchable after {timeout} s"
                )

    def close(self) -> None:
        """Makes what was added searchable and stops the background thread; searches still work."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def __enter__(self) -> "Datastore":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- the background thread -------------------------------------------------------------

    def _ingest(self) -> None:
        """Sorts what is queued; when nothing is, merges sub-indices slice by slice."""
        merging: Iterator[None] | None = None
        try:
            while (batch := self._next_batch(wait=merging is None)) is not None:
                if batch:
                    self._ingest_batch(batch)
                    merging = merging or self._merges()
                elif merging is not None:
                    try:
                        next(merging)
                    except StopIteration:
                        merging = None
        except BaseException as error:  # add() and flush() tell the callers
            logger.exception("The datastore's background thread failed")
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _next_batch(self, wait: bool) -> list[np.ndarray] | None:
        """What is due to be sorted (nothing yet: an empty list), or None when all is done."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._queue or self._closed)
            if not self._queue:
                return None if self._closed else []
            if wait:  # gather; a merge in progress gathers by itself
                self._changed.wait_for(
                    lambda: self._flushing or self._closed
                    or 2 * self._queued_tokens > self.live_buffer_tokens,
                    self.live_interval,
                )
            batch = list(self._queue)
            self._queue.clear()
            self._queued_tokens = 0
            self._batch_generation = self._generation
            return batch

    def _ingest_batch(self, batch: list[np.ndarray]) -> None:
        generation = self._batch_generation
        pieces = (piece for d in batch for piece in split_document(d, self._segment_tokens))
        new = list(build_segments(pieces, self.vocab_size, self._segment_tokens))
        absorbed = 0
        if len(new) == 1:
            # Small neighbours are merged at once, so that they do not pile up during a long merge.
            for elder in reversed(self._live):
                if elder in self._in_merge or elder.num_tokens > _INLINE_MERGE_TOKENS:
                    break
                if not self._should_merge(elder, new[0]):
                    break
                *_, merged = merge_in_slices(elder, new[0], self.vocab_size)
                assert merged is not None
                new[0] = merged
                absorbed += 1
        with self._changed:
            if generation == self._generation:
                kept = self._live[: len(self._live) - absorbed]
                self._publish(live=(*kept, *new))
            self._published += len(batch)
            self._changed.notify_all()

    def _should_merge(self, older: Segment, newer: Segment) -> bool:
        return (
            older.num_tokens <= _MERGE_RATIO * newer.num_tokens
            and older.num_tokens + newer.num_tokens <= self._segment_tokens
        )

    def _merges(self) -> Iterator[None]:
        """Merges neighbours that are close in size, the newest first; yields between slices."""
        while True:
            live = self._live
            pairs = [p for p in pairwise(live) if self._should_merge(*p)]
            if not pairs:
                return
            self._in_merge = older, newer = pairs[-1]
            merged = None
            for merged in merge_in_slices(older, newer, self.vocab_size):
                yield
            self._in_merge = ()
            assert merged is not None
            with self._changed:
                live = self._live
                # clear() or eviction may have taken either away meanwhile.
                if older in live and newer in live:
                    at = live.index(older)
                    self._publish(live=(*live[:at], merged, *live[at + 2 :]))

    # -- named corpora ---------------------------------------------------------------------

    def add_corpus(self, name: str, documents: Iterable[TokenIds]) -> int:
        """Builds a corpus in the calling thread; searchable as a whole on return.

        Returns its number of tokens. Raises DatastoreError if the name is taken, a document is
        invalid, there is no text, or all corpora would exceed max_corpus_tokens.
        """
        if not isinstance(name, str) or not name:
            raise DatastoreError(f"a corpus needs a name, got {name!r}")
        with self._changed:
            self._check_usable()
            self._check_new_corpus(name, 0)
        segments: list[Segment] = []
        total = 0
        for segment in build_segments(
            self._pieces(documents), self.vocab_size, self._segment_tokens
        ):
            segments.append(segment)
            total += segment.num_tokens
            with self._changed:
                self._check_new_corpus(name, total)
        if not segments:
            raise DatastoreError(f"corpus {name!r} holds no tokens")
        with self._changed:
            self._check_new_corpus(name, total)
            self._publish(corpora={**self._corpora, name: tuple(segments)})
        return total

    def remove_corpus(self, name: str) -> None:
        """Removes a corpus from all later searches; DatastoreError if there is none of the name."""
        with self._changed:
            if name not in self._corpora:
                known = ", ".join(map(repr, self._corpora)) or "none"
                raise DatastoreError(f"there is no corpus {name!r}; there are: {known}")
            self._publish(corpora={k: v for k, v in self._corpora.items() if k != name})

    def list_corpora(self) -> dict[str, int]:
        """Tokens of each named corpus."""
        corpora = self._corpora
        return {name: sum(s.num_tokens for s in segments) for name, segments in corpora.items()}

    def clear(self) -> None:
        """Empties the live collection, what is queued included; named corpora stay."""
        with self._changed:
            self._generation += 1
            self._published += len(self._queue)
            self._queue.clear()
            self._queued_tokens = 0
            self._publish(live=())
            self._changed.notify_all()

    def _check_new_corpus(self, name: str, tokens: int) -> None:
        if name in self._corpora:
            raise DatastoreError(f"corpus {name!r} exists already; remove it first")
        total = tokens + sum(self.list_corpora().values())
        if total > self.max_corpus_tokens:
            raise DatastoreError(
                f"corpus {name!r} does not fit: {total} tokens with the other corpora, "
                f"max_corpus_tokens is {self.max_corpus_tokens}"
            )

    # -- reading ---------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """What is searchable now; never changes afterwards."""
        return self._snapshot

    def __len__(self) -> int:
        """Searchable documents, live and in corpora."""
        return sum(s.documents for s in self._snapshot.segments)

    @property
    def num_tokens(self) -> int:
        """Searchable tokens, live and in corpora."""
        return sum(s.num_tokens for s in self._snapshot.segments)

    def info(self) -> DatastoreInfo:
        """Sizes and counters, all of the same moment."""
        with self._changed:
            segments = self._snapshot.segments
            tokens = sum(s.num_tokens for s in segments)
            nbytes = sum(s.nbytes for s in segments)
            return DatastoreInfo(
                vocab_size=self.vocab_size,
                tokenizer_fingerprint=self.tokenizer_fingerprint,
                num_tokens=tokens,
                num_documents=sum(s.documents for s in segments),
                segment_tokens=tuple(s.num_tokens for s in segments),
                corpora=self.list_corpora(),
                nbytes=nbytes,
                bytes_per_token=nbytes / tokens if tokens else 0.0,
                queued_documents=len(self._queue),
                queued_tokens=self._queued_tokens,
                dropped_documents=self._dropped,
                evicted_tokens=self._evicted_tokens,
            )

    # -- files -----------------------------------------------------------------------------

    def save(self, path: str | PathLike[str]) -> None:
        """Writes what is searchable to one file (storage.py), replacing it in one step.

        Call flush() before to have all that was added in it. DatastoreError if it cannot be
        written; an existing file is then as it was.
        """
        with self._changed:
            live, corpora = self._live, dict(self._corpora)
        content = StoredDatastore(self.vocab_size, self.tokenizer_fingerprint, live, corpora)
        write_datastore(path, content)

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        *,
        vocab_size: int | None = None,
        tokenizer_fingerprint: str | None = None,
        **options: Any,
    ) -> "Datastore":
        """Opens a saved file, memory-mapped and checked; other options as in __init__.

        DatastoreError if it is missing, damaged, or of another vocabulary size or (where both
        are known) tokenizer fingerprint than those given.
        """
        content = read_datastore(path, vocab_size, tokenizer_fingerprint)
        fingerprint = tokenizer_fingerprint or content.tokenizer_fingerprint
        store = cls(content.vocab_size, tokenizer_fingerprint=fingerprint, **options)
        with store._changed:
            store._publish(live=content.live, corpora=content.corpora)
        return store

    # -- internals -------------------------------------------------------------------------

    def _publish(
        self,
        live: tuple[Segment, ...] | None = None,
        corpora: dict[str, tuple[Segment, ...]] | None = None,
    ) -> None:
        """Replaces what is searchable, dropping the oldest live segments beyond max_tokens."""
        live = self._live if live is None else live
        while sum(s.num_tokens for s in live) > self.max_tokens:
            self._evicted_tokens += live[0].num_tokens
            live = live[1:]
        self._live = live
        self._corpora = self._corpora if corpora is None else corpora
        static = (s for segments in self._corpora.values() for s in segments)
        self._snapshot = Snapshot((*static, *live), self.vocab_size)

    def _pieces(self, documents: Iterable[TokenIds]) -> Iterator[np.ndarray]:
        for i, document in enumerate(documents):
            try:
                yield from split_document(self._checked(document), self._segment_tokens)
            except DatastoreError as error:
                raise DatastoreError(f"document {i}: {error}") from None

    def _checked(self, tokens: TokenIds) -> np.ndarray:
        return as_token_ids(tokens, self.vocab_size - 1)

    def _check_usable(self, closed_too: bool = True) -> None:
        if self._failure is not None:
            raise DatastoreError(f"the datastore's background thread failed: {self._failure!r}")
        if self._closed and closed_too:
            raise DatastoreError("the datastore is closed")


def _whole(name: str, value: int, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise DatastoreError(f"{name} must be a whole number, got {value!r}")
    if not low <= value <= high:
        raise DatastoreError(f"{name} must be between {low} and {high}, got {value}")
    return int(value)
