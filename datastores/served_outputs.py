"""What keeps a datastore's served outputs: memory, a folder, or one that another folds."""

from typing import Protocol

import numpy as np

from .segment import Segment


class ServedOutputs(Protocol):
    """Documents by namespace, searchable as they come. Thread-safe.

    MemoryCollection keeps them in memory only, DurableCollection in a folder, and
    FollowingCollection in one that another process folds: its fold() raises DatastoreError.
    """

    @property
    def background_error(self) -> str | None:
        """What the last attempt to write files failed with; None: it did not."""

    def add(self, namespace: str, tokens: np.ndarray, digest: bytes) -> bool:
        """Takes in a document (int32[n], not empty); False if there is no room for it.

        digest: document_digest() of the name under which it can be deleted.
        """

    def flush(self, timeout: float | None) -> None:
        """Waits until all that was added before is searchable.

        Raises TimeoutError after `timeout` seconds.
        """

    def fold(self, timeout: float | None) -> None:
        """Waits until all that was added before is in files, where there are any.

        Raises TimeoutError after `timeout` seconds.
        """

    def delete(self, namespace: str | None, digest: bytes | None) -> int:
        """Removes documents, of one namespace or all, of one name or all; returns their tokens."""

    def segments_of(self, namespace: str) -> tuple[Segment, ...]:
        """What is searchable of a namespace, oldest first."""

    def namespaces(self) -> dict[str, int]:
        """Tokens by namespace."""

    def counters(self) -> dict[str, float]:
        """queued_documents, queued_tokens, ingest_lag, unfolded_tokens, evicted_tokens, and what
        only some have: pending_deletions, background_failures, folded_logs."""

    def close(self) -> None:
        """Ends the threads; searches still work."""
