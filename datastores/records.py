"""What the records of a log say: documents and deletions (the format: wal.py)."""

import struct
from dataclasses import dataclass, field

import numpy as np

from .segment import MAX_NAME_BYTES, NO_DIGEST, NUMBER_LIMIT, Document

DOCUMENT = 1
DELETION = 2
_PAYLOAD = struct.Struct("<BQ16sH")
PAYLOAD_BYTES = _PAYLOAD.size


@dataclass(frozen=True)
class Deletion:
    """Takes away documents that came before it.

    namespace: of this one only; None: of all. digest: with this document_digest() only; None: all.
    """

    number: int
    namespace: str | None = None
    digest: bytes | None = None

    def concerns(self, namespace: str) -> bool:
        """Whether anything of a namespace may have to go."""
        return self.namespace is None or self.namespace == namespace

    def takes_document(self, namespace: str, document: Document) -> bool:
        """Whether it takes a document of a namespace."""
        return (
            self.concerns(namespace)
            and document.number < self.number
            and self.digest in (None, document.digest)
        )

    def takes(self, documents: np.ndarray) -> np.ndarray:
        """bool[n]: which of these it takes (DOCUMENT_DTYPE[n], of a namespace that it concerns)."""
        gone = documents["number"] < np.uint64(self.number)
        if self.digest is not None:
            gone &= documents["digest"] == np.void(self.digest)
        return gone


@dataclass
class LogContent:
    """What a log file holds, in the order of its numbers."""

    documents: list[tuple[str, Document]] = field(default_factory=list)
    """(namespace, document); those that a deletion of the same file takes are in it still."""
    deletions: list[Deletion] = field(default_factory=list)
    last_number: int = -1
    damaged_bytes: int = 0
    """Bytes passed over: an incomplete record at the end, or damage."""
    torn_only: bool = True
    """Whether these are at the end only, as a kill leaves them."""


def document_payload(namespace: str, document: Document, dtype: type) -> bytes:
    """A document's payload, its tokens in the log's dtype."""
    head = _payload(DOCUMENT, document.number, document.digest, namespace)
    return head + document.tokens.astype(dtype).tobytes()


def deletion_payload(deletion: Deletion) -> bytes:
    """A deletion's payload."""
    digest, namespace = deletion.digest or NO_DIGEST, deletion.namespace or ""
    return _payload(DELETION, deletion.number, digest, namespace)


def add_payload(payload: memoryview, dtype: np.dtype, vocab_size: int, content: LogContent) -> bool:
    """Adds what a payload says to `content`; False: no datastore has written it."""
    if len(payload) < PAYLOAD_BYTES:
        return False
    kind, number, digest, size = _PAYLOAD.unpack_from(payload)
    at = PAYLOAD_BYTES + size
    name, rest = bytes(payload[PAYLOAD_BYTES:at]), payload[at:]
    if len(name) != size or size > MAX_NAME_BYTES:
        return False
    # Pieces of one document have one number.
    if not content.last_number <= number < NUMBER_LIMIT:
        return False
    try:
        namespace = name.decode()
    except UnicodeDecodeError:
        return False
    if kind == DELETION and not rest:
        wanted = None if digest == NO_DIGEST else digest
        content.deletions.append(Deletion(number, namespace or None, wanted))
    elif kind == DOCUMENT and namespace and rest and not len(rest) % dtype.itemsize:
        tokens = np.frombuffer(rest, dtype)
        if int(tokens.max()) >= vocab_size:
            return False
        content.documents.append((namespace, Document(tokens.astype(np.int32), number, digest)))
    else:
        return False
    content.last_number = number
    return True


def _payload(kind: int, number: int, digest: bytes, namespace: str) -> bytes:
    encoded = namespace.encode()
    return _PAYLOAD.pack(kind, number, digest, len(encoded)) + encoded
