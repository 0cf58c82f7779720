"""Merging sub-index files of served outputs, so that a search meets few of them."""

import contextlib
import logging
import threading
from collections.abc import Iterator
from itertools import pairwise

from .config import DatastoreError
from .folder import Folder, SubIndexFile
from .folding import FoldJob, FoldWorker
from .live import MERGE_RATIO
from .manifest import FileEntry

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_LONGEST_RETRY_SECONDS = 60.0


class Merger:
    """A thread that merges neighbours that are close in size, through a process of its own."""

    def __init__(self, folder: Folder, segment_tokens: int) -> None:
        self._folder = folder
        self._segment_tokens = segment_tokens
        self._worker = FoldWorker()
        self._state = threading.Condition()
        self._paused = 0
        self._busy = False
        self._retry = _RETRY_SECONDS
        self._error: str | None = None
        self._wake = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="datastore-merge", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Says that files have come."""
        with self._state:
            self._wake = True
            self._state.notify_all()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No merge runs inside the block; one that runs is given up, its output removed."""
        with self._state:
            self._paused += 1
        self._worker.cancel()
        with self._state:
            self._state.wait_for(lambda: not self._busy)
        try:
            yield
        finally:
            with self._state:
                self._paused -= 1
                self._wake = True
                self._state.notify_all()

    def wait_idle(self, timeout: float | None) -> None:
        """Waits until nothing is left to merge. TimeoutError, or DatastoreError if it fails."""
        with self._state:
            self._error = None
            done = self._state.wait_for(
                lambda: self._closed or self._error or not (self._busy or self._next_pair()),
                timeout,
            )
            if self._error is not None:
                raise DatastoreError(self._error)
            if not done:
                raise TimeoutError(f"sub-indices were not merged after {timeout} s")

    def close(self) -> None:
        with self._state:
            self._closed = True
            self._state.notify_all()
        self._worker.close()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: (self._wake and not self._paused) or self._closed)
                if self._closed:
                    return
                pair = self._next_pair()
                self._wake = pair is not None
                self._busy = pair is not None
            if pair is None:
                continue
            try:
                self._merge(*pair)
                self._retry, self._error = _RETRY_SECONDS, None
            except Exception as error:  # whatever it is: the thread must go on
                self._after_failure(error)
            finally:
                with self._state:
                    self._busy = False
                    self._state.notify_all()

    def _after_failure(self, error: Exception) -> None:
        if self._paused or self._closed:  # given up on purpose
            return
        logger.warning("Sub-indices were not merged, trying again later: %r", error)
        with self._state:
            self._busy = False
            self._error = f"sub-indices were not merged: {error}"
            self._state.notify_all()
            self._state.wait_for(lambda: self._closed or self._paused > 0, self._retry)
            self._retry = min(2 * self._retry, _LONGEST_RETRY_SECONDS)

    def _next_pair(self) -> tuple[SubIndexFile, SubIndexFile] | None:
        """The newest neighbours of which the older is not much larger than the newer."""
        for older, newer in reversed(list(pairwise(self._folder.live_files))):
            small, large = newer.entry.tokens, older.entry.tokens
            fits = small + large <= self._segment_tokens
            if fits and large <= MERGE_RATIO * small and not (older.problem or newer.problem):
                return older, newer
        return None

    def _merge(self, older: SubIndexFile, newer: SubIndexFile) -> None:
        folder, manifest = self._folder, self._folder.manifest
        name = folder.new_file_name()
        job = FoldJob(
            folder.file_path(name),
            manifest.vocab_size,
            manifest.tokenizer_fingerprint,
            self._segment_tokens,
            containers=tuple(folder.file_path(f.entry.name) for f in (older, newer)),
        )
        try:
            tokens = self._worker.run(job)
        except DatastoreError:
            folder.discard(name)
            raise
        if folder.publish(add=[FileEntry(name, tokens)], remove=[older, newer]):
            logger.info(
                "Sub-indices merged: %d + %d tokens", older.entry.tokens, newer.entry.tokens
            )
