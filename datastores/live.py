"""Fresh documents: queued, sorted in the background, merged, per namespace, all in memory."""

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from .config import DatastoreError
from .room import Room
from .segment import (
    Document,
    Segment,
    build_segments,
    document_lengths,
    merge,
    merge_in_slices,
    without_documents,
)
from .wal import Deletion

logger = logging.getLogger(__name__)

MAX_SEGMENT_TOKENS = 1 << 29
SEGMENTS_PER_COLLECTION = 8
# A segment is merged with its elder while the elder has no more than this many times its tokens
# (taking it for no smaller than the second number): beside the full ones there are at most about
# log4(tokens / 1024).
MERGE_RATIO = 4
_SMALL_SEGMENT_TOKENS = 1024
_MANY_SEGMENTS = 24
_INLINE_MERGE_TOKENS = 1 << 16

Segments = dict[str, tuple[Segment, ...]]


class _Sorted(NamedTuple):
    """A namespace's part of a batch, sorted."""

    namespace: str
    documents: list[Document]
    elders: tuple[Segment, ...]
    """What was searchable of the namespace when it was sorted."""
    segments: tuple[Segment, ...]
    """What is searchable with the documents, small neighbours merged."""


class LiveCollection:
    """Segments by namespace, oldest first, that grow by add(). Thread-safe.

    on_change is called, in whichever thread, after `segments` was replaced. max_tokens: beyond
    them the oldest segments of the largest namespace are dropped; None: whoever adds sees to the
    size. buffer_tokens: most that wait to be sorted; share: a namespace's part of them (Room).
    """

    def __init__(
        self,
        vocab_size: int,
        max_tokens: int | None,
        buffer_tokens: int,
        interval: float,
        on_change: Callable[[], None],
        share: float = 1.0,
    ) -> None:
        self.segments: Segments = {}
        self.segment_tokens = segment_limit(max_tokens)
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._interval = interval
        self._on_change = on_change
        # One lock for all that follows; held for moments only, never while sorting or merging.
        self._changed = threading.Condition()
        self._queue: deque[tuple[str, Document]] = deque()
        self._waiting = Room(buffer_tokens, share)  # for what is in the queue
        self._buffer_tokens = buffer_tokens
        self._oldest_at: float | None = None  # when the first document not searchable yet came
        self._batch_deletions: list[Deletion] = []  # those that came since the batch was taken
        self._in_merge: tuple[Segment, ...] = ()
        self._added = 0  # documents taken by add()
        self._published = 0  # of these, searchable or evicted
        self._evicted_tokens = 0
        self._flushing = 0
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failure: BaseException | None = None

    def has_room(self, namespace: str, tokens: int) -> bool:
        """Whether a document of so many tokens would be taken now."""
        with self._changed:
            return self._waiting.fits(namespace, tokens)

    def add(self, namespace: str, document: Document) -> bool:
        """Queues a document, which must not change afterwards; False if the queue is full, or what
        the namespace may have of it."""
        with self._changed:
            self.check_usable()
            if not self._waiting.fits(namespace, document.tokens.size):
                return False
            self._queue.append((namespace, document))
            self._waiting.take(namespace, document.tokens.size)
            self._added += 1
            if self._oldest_at is None:
                self._oldest_at = time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="datastore-ingest", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
            return True

    def append(self, new: Mapping[str, Sequence[Segment]]) -> None:
        """Adds finished segments, by namespace, as the newest ones. Not where max_tokens is set."""
        with self._changed:
            grown = {name: (*self.segments.get(name, ()), *new[name]) for name in new}
            self.segments = {**self.segments, **grown}
            self._on_change()

    def flush(self, timeout: float | None) -> None:
        """Waits until all that was added before is searchable, or raises TimeoutError."""
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
            self._check_thread()
            if not done:
                raise TimeoutError(
                    f"{goal - self._published} documents were not searchable after {timeout} s"
                )

    def delete(self, deletion: Deletion) -> None:
        """Takes documents out of the queue and of all segments, at once."""
        with self._changed:
            kept = deque(
                (name, d) for name, d in self._queue if not takes_document(deletion, name, d)
            )
            self._published += len(self._queue) - len(kept)
            self._queue = kept
            self._waiting.clear()
            for name, document in kept:
                self._waiting.take(name, document.tokens.size)
            self._batch_deletions.append(deletion)
            # All namespaces in one step: publishing each copies the table of all.
            left = {
                name: apply_deletion(deletion, segments, self._vocab_size)
                if deletion.concerns(name)
                else segments
                for name, segments in self.segments.items()
            }
            self.segments = {name: segments for name, segments in left.items() if segments}
            self._on_change()
            self._changed.notify_all()

    def close(self) -> None:
        """Makes what was added searchable and ends the thread."""
        self.seal()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def seal(self) -> None:
        """As close(), without waiting for it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def num_tokens(self) -> int:
        """Tokens that are searchable or on their way."""
        with self._changed:
            return self._waiting.tokens + sum(map(_total_tokens, self.segments.values()))

    @property
    def queued_documents(self) -> int:
        return len(self._queue)

    @property
    def queued_tokens(self) -> int:
        return self._waiting.tokens

    @property
    def evicted_tokens(self) -> int:
        return self._evicted_tokens

    @property
    def lag(self) -> float:
        """Seconds since the oldest document came that is not searchable yet; 0.0: all are."""
        oldest = self._oldest_at
        return 0.0 if oldest is None else time.monotonic() - oldest

    def check_usable(self) -> None:
        """DatastoreError if nothing can be added any more."""
        self._check_thread()
        if self._closed:
            raise DatastoreError("the datastore is closed")

    def _check_thread(self) -> None:
        if self._failure is not None:
            raise DatastoreError(f"the datastore's background thread failed: {self._failure!r}")

    def _publish(self, changed: Mapping[str, tuple[Segment, ...]]) -> None:
        """Replaces what is searchable of some namespaces, dropping segments beyond max_tokens.

        Copies the table of all namespaces, so that readers' one never changes.
        """
        everything = {**self.segments, **changed}
        if self._max_tokens is not None:
            self._make_room(everything, self._max_tokens)
        self.segments = {name: kept for name, kept in everything.items() if kept}
        self._on_change()

    def _make_room(self, everything: Segments, most: int) -> None:
        """Drops the oldest segments of the namespace that has the most tokens, until they fit.

        So no namespace pushes out a smaller one's.
        """
        excess = sum(map(_total_tokens, everything.values())) - most
        if excess <= 0:
            return
        largest = [(-_total_tokens(s), at, n) for at, (n, s) in enumerate(everything.items())]
        heapq.heapify(largest)
        while excess > 0:
            size, at, name = largest[0]
            dropped = everything[name][0].num_tokens
            everything[name] = everything[name][1:]
            heapq.heapreplace(largest, (size + dropped, at, name))
            excess -= dropped
            self._evicted_tokens += dropped

    # -- the background thread -------------------------------------------------------------

    def _run(self) -> None:
        """Sorts what is queued; when nothing is, merges segments slice by slice."""
        merging: Iterator[None] | None = None
        try:
            while True:
                # Searches slow down with the number of segments, so a flood has to wait (and
                # fills the queue, which drops) while there are many to be merged.
                flooded = merging is not None and self._most_segments() > _MANY_SEGMENTS
                batch = [] if flooded else self._next_batch(wait=merging is None)
                if batch is None:
                    return
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

    def _most_segments(self) -> int:
        return max(map(len, self.segments.values()), default=0)

    def _next_batch(self, wait: bool) -> list[tuple[str, Document]] | None:
        """What is due to be sorted (nothing yet: an empty list), or None when all is done."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._queue or self._closed)
            if not self._queue:
                return None if self._closed else []
            if wait:  # gather; between the slices of a merge what is there is taken at once
                self._changed.wait_for(self._is_due, self._interval)
            batch = list(self._queue)
            self._queue.clear()
            self._waiting.clear()
            self._batch_deletions.clear()
            return batch

    def _is_due(self) -> bool:
        half_full = 2 * self._waiting.tokens > self._buffer_tokens
        return half_full or self._flushing > 0 or self._closed

    def _ingest_batch(self, batch: list[tuple[str, Document]]) -> None:
        by_namespace: dict[str, list[Document]] = {}
        for namespace, document in batch:
            by_namespace.setdefault(namespace, []).append(document)
        sorted_ = [self._sorted(name, documents) for name, documents in by_namespace.items()]
        with self._changed:
            # All namespaces in one step: publishing each copies the table of all.
            self._publish({each.namespace: self._grown(each) for each in sorted_})
            self._published += len(batch)
            self._oldest_at = time.monotonic() - self._interval if self._queue else None
            self._changed.notify_all()

    def _sorted(self, namespace: str, documents: list[Document]) -> _Sorted:
        elders = self.segments.get(namespace, ())
        new = list(build_segments(documents, self._vocab_size, self.segment_tokens))
        absorbed = self._absorb_small(elders, new) if len(new) == 1 else elders
        return _Sorted(namespace, documents, elders, (*absorbed, *new))

    def _absorb_small(self, elders: tuple[Segment, ...], new: list[Segment]) -> tuple[Segment, ...]:
        """Merges small neighbours into new[0], so that they do not pile up; the elders left."""
        while elders:
            elder = elders[-1]
            if elder in self._in_merge or elder.num_tokens > _INLINE_MERGE_TOKENS:
                break
            if not self._should_merge(elder, new[0]):
                break
            new[0] = merge(elder, new[0], self._vocab_size)
            elders = elders[:-1]
        return elders

    def _grown(self, batch: _Sorted) -> tuple[Segment, ...]:
        """A namespace's segments with its part of a batch, whatever came while it was sorted."""
        kept = [
            document
            for document in batch.documents
            if not any(takes_document(d, batch.namespace, document) for d in self._batch_deletions)
        ]
        present = self.segments.get(batch.namespace, ())
        if len(kept) == len(batch.documents) and present == batch.elders:
            return batch.segments
        return (*present, *build_segments(kept, self._vocab_size, self.segment_tokens))

    def _should_merge(self, older: Segment, newer: Segment) -> bool:
        return (
            older.num_tokens <= MERGE_RATIO * max(newer.num_tokens, _SMALL_SEGMENT_TOKENS)
            and older.num_tokens + newer.num_tokens <= self.segment_tokens
        )

    def _merges(self) -> Iterator[None]:
        """Merges neighbours that are close in size, the newest first; yields between slices."""
        while True:
            pair = self._next_merge()
            if pair is None:
                return
            namespace, older, newer = pair
            self._in_merge = older, newer
            slices = merge_in_slices(older, newer, self._vocab_size)
            while (merged := next(slices)) is None:
                yield
            self._in_merge = ()
            with self._changed:
                segments = self.segments.get(namespace, ())
                # A deletion or eviction may have taken either away meanwhile.
                if older in segments and newer in segments:
                    at = segments.index(older)
                    self._publish({namespace: (*segments[:at], merged, *segments[at + 2 :])})

    def _next_merge(self) -> tuple[str, Segment, Segment] | None:
        for namespace, segments in self.segments.items():
            for older, newer in reversed(list(pairwise(segments))):
                if self._should_merge(older, newer):
                    return namespace, older, newer
        return None


def segment_limit(max_tokens: int | None) -> int:
    """Most tokens of one sub-index of a collection of max_tokens."""
    if max_tokens is None:
        return MAX_SEGMENT_TOKENS
    return min(MAX_SEGMENT_TOKENS, max(1, max_tokens // SEGMENTS_PER_COLLECTION))


def apply_deletion(
    deletion: Deletion, segments: Sequence[Segment], vocab_size: int
) -> tuple[Segment, ...]:
    """The segments of a namespace that it concerns, without what it takes."""
    remaining = (
        without_documents(segment, deletion.takes(segment.documents), vocab_size)
        for segment in segments
    )
    return tuple(segment for segment in remaining if segment is not None)


def count_taken(deletion: Deletion, segments: Sequence[Segment]) -> int:
    """Tokens of the documents that it takes from the segments of a namespace it concerns."""
    taken = ((s, deletion.takes(s.documents)) for s in segments)
    # Nearly always it takes nothing of a segment: their lengths cost more than the look.
    return sum(int((document_lengths(s)[gone] - 1).sum()) for s, gone in taken if gone.any())


def hides(deletions: Sequence[Deletion], segment: Segment) -> bool:
    """Whether a segment of a file is left out whole while deletions are pending.

    Rewriting it is the fold process's work; until that is done a little less is found.
    """
    return any(deletion.takes(segment.documents).any() for deletion in deletions)


def takes_document(deletion: Deletion, namespace: str, document: Document) -> bool:
    """Whether it takes a document of a namespace."""
    return (
        deletion.concerns(namespace)
        and document.number < deletion.number
        and deletion.digest in (None, document.digest)
    )


def _total_tokens(segments: Sequence[Segment]) -> int:
    return sum(segment.num_tokens for segment in segments)
