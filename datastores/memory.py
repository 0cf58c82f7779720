"""Served outputs kept in memory only, with the interface of DurableCollection."""

import itertools
import logging
import threading
from collections.abc import Callable

import numpy as np

from .live import LiveCollection, count_taken
from .segment import Document, Segment
from .wal import Deletion

logger = logging.getLogger(__name__)


class MemoryCollection:
    """Documents by namespace, lost with the process. Thread-safe."""

    background_error: str | None = None
    """No files are written: nothing fails."""

    def __init__(
        self,
        vocab_size: int,
        max_tokens: int,
        buffer_tokens: int,
        interval: float,
        on_change: Callable[[], None],
        share: float = 1.0,
    ) -> None:
        self._live = LiveCollection(
            vocab_size, max_tokens, buffer_tokens, interval, on_change, share
        )
        self.segment_tokens = self._live.segment_tokens
        self._numbers = itertools.count()
        self._adding = threading.Lock()
        self._complained = False

    def add(self, namespace: str, tokens: np.ndarray, digest: bytes) -> bool:
        """Queues a document; False if the queue is full, or the namespace's share of it."""
        with self._adding:
            taken = self._live.add(namespace, Document(tokens, next(self._numbers), digest))
        if not taken and not self._complained:
            self._complained = True
            logger.warning(
                "The datastore's queue is full, or a namespace's share of it: documents are dropped"
            )
        return taken

    def flush(self, timeout: float | None) -> None:
        """Waits until all that was added before is searchable, or raises TimeoutError."""
        self._live.flush(timeout)

    def fold(self, timeout: float | None) -> None:
        """There are no files: the same as flush()."""
        self._live.flush(timeout)

    def segments_of(self, namespace: str) -> tuple[Segment, ...]:
        """What is searchable of a namespace, oldest first."""
        return self._live.segments.get(namespace, ())

    def namespaces(self) -> dict[str, int]:
        """Tokens by namespace."""
        segments = self._live.segments
        return {name: sum(s.num_tokens for s in group) for name, group in segments.items()}

    def counters(self) -> dict[str, float]:
        """queued_documents, queued_tokens, ingest_lag, unfolded_tokens, evicted_tokens."""
        return {
            "queued_documents": self._live.queued_documents,
            "queued_tokens": self._live.queued_tokens,
            "ingest_lag": self._live.lag,
            "unfolded_tokens": 0,
            "evicted_tokens": self._live.evicted_tokens,
        }

    def delete(self, namespace: str | None, digest: bytes | None) -> int:
        """Removes documents; returns their tokens."""
        self.flush(None)
        with self._adding:
            deletion = Deletion(next(self._numbers), namespace, digest)
            removed = sum(
                count_taken(deletion, segments)
                for name, segments in self._live.segments.items()
                if deletion.concerns(name)
            )
            self._live.delete(deletion)
        return removed

    def close(self) -> None:
        """Makes what was added searchable and ends the thread."""
        self._live.close()
