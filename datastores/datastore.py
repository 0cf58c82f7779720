"""The datastore: finished outputs and named corpora, searchable while it grows."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np

from .config import DatastoreError
from .input_trie import as_token_ids
from .live import LiveCollection
from .segment import Segment, Snapshot, build_segments, split_document
from .storage import StoredDatastore, read_datastore, write_datastore

MAX_VOCAB_SIZE = 1 << 30

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
        self._live = LiveCollection(
            self.vocab_size,
            self.max_tokens,
            self.live_buffer_tokens,
            self.live_interval,
            self._refresh,
        )
        self._corpora: dict[str, tuple[Segment, ...]] = {}
        self._lock = threading.Lock()  # for _corpora and _snapshot; held for moments only
        self._snapshot = Snapshot((), self.vocab_size)

    @classmethod
    def build(cls, documents: Iterable[TokenIds], vocab_size: int, **options: Any) -> "Datastore":
        """A datastore whose live collection holds the documents; options as in __init__."""
        store = cls(vocab_size, **options)
        pieces = store._pieces(documents)
        store._live.append(build_segments(pieces, vocab_size, store._live.segment_tokens))
        return store

    # -- live ingest -----------------------------------------------------------------------

    def add(self, tokens: TokenIds) -> None:
        """Queues one document, a finished output; it becomes searchable in the background.

        Returns at once. Dropped (and counted in info()) if the queue is full.
        """
        document = self._checked(tokens).copy()
        if document.size:
            self._live.add(document)

    def flush(self, timeout: float | None = None) -> None:
        """Waits until all that was added before is searchable.

        Raises TimeoutError after `timeout` seconds.
        """
        self._live.flush(timeout)

    def close(self) -> None:
        """Makes what was added searchable and stops the background thread; searches still work."""
        self._live.close()

    def __enter__(self) -> "Datastore":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- named corpora ---------------------------------------------------------------------

    def add_corpus(self, name: str, documents: Iterable[TokenIds]) -> int:
        """Builds a corpus in the calling thread; searchable as a whole on return.

        Returns its number of tokens. Raises DatastoreError if the name is taken, a document is
        invalid, there is no text, or all corpora would exceed max_corpus_tokens.
        """
        if not isinstance(name, str) or not name:
            raise DatastoreError(f"a corpus needs a name, got {name!r}")
        self._live.check_usable()
        self._check_new_corpus(name, 0)
        segments: list[Segment] = []
        total = 0
        for segment in build_segments(
            self._pieces(documents), self.vocab_size, self._live.segment_tokens
        ):
            segments.append(segment)
            total += segment.num_tokens
            self._check_new_corpus(name, total)
        if not segments:
            raise DatastoreError(f"corpus {name!r} holds no tokens")
        with self._lock:
            self._check_new_corpus(name, total)  # others may have come meanwhile
            self._corpora = {**self._corpora, name: tuple(segments)}
        self._refresh()
        return total

    def remove_corpus(self, name: str) -> None:
        """Removes a corpus from all later searches; DatastoreError if there is none of the name."""
        with self._lock:
            if name not in self._corpora:
                known = ", ".join(map(repr, self._corpora)) or "none"
                raise DatastoreError(f"there is no corpus {name!r}; there are: {known}")
            self._corpora = {k: v for k, v in self._corpora.items() if k != name}
        self._refresh()

    def list_corpora(self) -> dict[str, int]:
        """Tokens of each named corpus."""
        corpora = self._corpora
        return {name: sum(s.num_tokens for s in segments) for name, segments in corpora.items()}

    def clear(self) -> None:
        """Empties the live collection, what is queued included; named corpora stay."""
        self._live.clear()

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
        """Sizes and counters."""
        with self._lock:
            segments, corpora = self._snapshot.segments, self.list_corpora()
        tokens = sum(s.num_tokens for s in segments)
        nbytes = sum(s.nbytes for s in segments)
        return DatastoreInfo(
            vocab_size=self.vocab_size,
            tokenizer_fingerprint=self.tokenizer_fingerprint,
            num_tokens=tokens,
            num_documents=sum(s.documents for s in segments),
            segment_tokens=tuple(s.num_tokens for s in segments),
            corpora=corpora,
            nbytes=nbytes,
            bytes_per_token=nbytes / tokens if tokens else 0.0,
            **self._live.counters(),
        )

    # -- files -----------------------------------------------------------------------------

    def save(self, path: str | PathLike[str]) -> None:
        """Writes what is searchable to one file (storage.py), replacing it in one step.

        Call flush() before to have all that was added in it. DatastoreError if it cannot be
        written; an existing file is then as it was.
        """
        live, corpora = self._live.segments, self._corpora
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
        store._corpora = content.corpora
        store._live.append(content.live)
        store._refresh()
        return store

    # -- internals -------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Puts a new snapshot in place; it shows the latest state whoever comes first."""
        with self._lock:
            static = (s for segments in self._corpora.values() for s in segments)
            self._snapshot = Snapshot((*static, *self._live.segments), self.vocab_size)

    def _pieces(self, documents: Iterable[TokenIds]) -> Iterator[np.ndarray]:
        for i, document in enumerate(documents):
            try:
                yield from split_document(self._checked(document), self._live.segment_tokens)
            except DatastoreError as error:
                raise DatastoreError(f"document {i}: {error}") from None

    def _checked(self, tokens: TokenIds) -> np.ndarray:
        return as_token_ids(tokens, self.vocab_size - 1)


def _whole(name: str, value: int, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise DatastoreError(f"{name} must be a whole number, got {value!r}")
    if not low <= value <= high:
        raise DatastoreError(f"{name} must be between {low} and {high}, got {value}")
    return int(value)
