"""The live collection: documents are queued, sorted in the background, merged, dropped by age."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import numpy as np

from .config import DatastoreError
from .segment import Segment, build_segments, merge, merge_in_slices, split_document

logger = logging.getLogger(__name__)

_MAX_SEGMENT_TOKENS = 1 << 29
_SEGMENTS_PER_COLLECTION = 8
# A segment is merged with its elder while the elder has no more than this many times its tokens
# (taking it for no smaller than the second number): beside the full ones there are at most about
# log4(tokens / 1024).
_MERGE_RATIO = 4
_SMALL_SEGMENT_TOKENS = 1024
_MANY_SEGMENTS = 24
_INLINE_MERGE_TOKENS = 1 << 16


class LiveCollection:
    """Segments, oldest first, that grow by add(). Thread-safe; see Datastore for the options.

    on_change is called, in whichever thread, after `segments` was replaced.
    """

    def __init__(
        self,
        vocab_size: int,
        max_tokens: int,
        buffer_tokens: int,
        interval: float,
        on_change: Callable[[], None],
    ) -> None:
        self.segments: tuple[Segment, ...] = ()
        self.segment_tokens = min(
            _MAX_SEGMENT_TOKENS, max(1, max_tokens // _SEGMENTS_PER_COLLECTION)
        )
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._buffer_tokens = buffer_tokens
        self._interval = interval
        self._on_change = on_change
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
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failure: BaseException | None = None

    def add(self, document: np.ndarray) -> None:
        """Queues a document, which must not change afterwards; drops it if the queue is full."""
        with self._changed:
            self.check_usable()
            if self._queued_tokens + document.size > self._buffer_tokens:
                if self._dropped == 0:
                    logger.warning(
                        "The datastore's queue is full (%d tokens): documents are dropped; "
                        "raise live_buffer_tokens",
                        self._buffer_tokens,
                    )
                self._dropped += 1
                return
            self._queue.append(document)
            self._queued_tokens += document.size
            self._added += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="datastore-ingest", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def append(self, segments: Iterable[Segment]) -> None:
        """Adds finished segments as the newest ones."""
        for segment in segments:
            with self._changed:
                self._publish((*self.segments, segment))

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

    def clear(self) -> None:
        """Drops all segments and all that is queued."""
        with self._changed:
            self._generation += 1
            self._published += len(self._queue)
            self._queue.clear()
            self._queued_tokens = 0
            self._publish(())
            self._changed.notify_all()

    def close(self) -> None:
        """Makes what was added searchable and ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def counters(self) -> dict[str, int]:
        """The counters of DatastoreInfo, all of the same moment."""
        with self._changed:
            return {
                "queued_documents": len(self._queue),
                "queued_tokens": self._queued_tokens,
                "dropped_documents": self._dropped,
                "evicted_tokens": self._evicted_tokens,
            }

    def check_usable(self) -> None:
        """DatastoreError if nothing can be added any more."""
        self._check_thread()
        if self._closed:
            raise DatastoreError("the datastore is closed")

    def _check_thread(self) -> None:
        if self._failure is not None:
            raise DatastoreError(f"the datastore's background thread failed: {self._failure!r}")

    def _publish(self, segments: tuple[Segment, ...]) -> None:
        """Replaces what is searchable, dropping the oldest segments beyond max_tokens."""
        while sum(s.num_tokens for s in segments) > self._max_tokens:
            self._evicted_tokens += segments[0].num_tokens
            segments = segments[1:]
        self.segments = segments
        self._on_change()

    # -- the background thread -------------------------------------------------------------

    def _run(self) -> None:
        """Sorts what is queued; when nothing is, merges segments slice by slice."""
        merging: Iterator[None] | None = None
        try:
            while True:
                # Searches slow down with the number of segments, so a flood has to wait (and
                # fills the queue, which drops) while there are many to be merged.
                flooded = merging is not None and len(self.segments) > _MANY_SEGMENTS
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

    def _next_batch(self, wait: bool) -> list[np.ndarray] | None:
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
            self._queued_tokens = 0
            self._batch_generation = self._generation
            return batch

    def _is_due(self) -> bool:
        half_full = 2 * self._queued_tokens > self._buffer_tokens
        return half_full or self._flushing > 0 or self._closed

    def _ingest_batch(self, batch: list[np.ndarray]) -> None:
        generation = self._batch_generation
        pieces = (piece for d in batch for piece in split_document(d, self.segment_tokens))
        new = list(build_segments(pieces, self._vocab_size, self.segment_tokens))
        absorbed = 0
        if len(new) == 1:
            # Small neighbours are merged at once, so that they do not pile up during a long merge.
            for elder in reversed(self.segments):
                if elder in self._in_merge or elder.num_tokens > _INLINE_MERGE_TOKENS:
                    break
                if not self._should_merge(elder, new[0]):
                    break
                new[0] = merge(elder, new[0], self._vocab_size)
                absorbed += 1
        with self._changed:
            if generation == self._generation:
                kept = self.segments[: len(self.segments) - absorbed]
                self._publish((*kept, *new))
            self._published += len(batch)
            self._changed.notify_all()

    def _should_merge(self, older: Segment, newer: Segment) -> bool:
        return (
            older.num_tokens <= _MERGE_RATIO * max(newer.num_tokens, _SMALL_SEGMENT_TOKENS)
            and older.num_tokens + newer.num_tokens <= self.segment_tokens
        )

    def _merges(self) -> Iterator[None]:
        """Merges neighbours that are close in size, the newest first; yields between slices."""
        while True:
            pairs = [p for p in pairwise(self.segments) if self._should_merge(*p)]
            if not pairs:
                return
            self._in_merge = older, newer = pairs[-1]
            slices = merge_in_slices(older, newer, self._vocab_size)
            while (merged := next(slices)) is None:
                yield
            self._in_merge = ()
            with self._changed:
                segments = self.segments
                # clear() or eviction may have taken either away meanwhile.
                if older in segments and newer in segments:
                    at = segments.index(older)
                    self._publish((*segments[:at], merged, *segments[at + 2 :]))
