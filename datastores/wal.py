"""The write-ahead log: what was acknowledged is in it, whatever kills the process.

    offset  content (little-endian)
    0       magic b"TOKENLOG", u32 version (1), u32 vocabulary size, 16 bytes: digest of the
            tokenizer fingerprint (zeros: none), u32 CRC-32 of these 32 bytes
    36      records

A record: u32 0x4C4F4752, u32 payload bytes, u32 CRC-32 of the payload, payload. A payload: u8 kind
(1 document, 2 deletion), u64 number, 16 bytes digest, u16 bytes of the namespace, namespace in
UTF-8, tokens (uint16 or uint32, as token_dtype says; none in a deletion). Numbers rise from record
to record. A deletion takes away what came before it: of its namespace (empty: of all), with its
digest (zeros: all). Each record is one write() call; a reader passes over what is incomplete.
"""

import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .config import DatastoreError
from .segment import NO_DIGEST, Document, document_digest
from .suffix_array import token_dtype

MAGIC = b"TOKENLOG"
VERSION = 1
DOCUMENT = 1
DELETION = 2
_HEADER = struct.Struct("<8sII16s")
_CHECKSUM = struct.Struct("<I")
_FRAME = struct.Struct("<III")
_PAYLOAD = struct.Struct("<BQ16sH")
_RECORD_MAGIC = 0x4C4F4752
_MAX_PAYLOAD = 1 << 31
HEADER_BYTES = _HEADER.size + _CHECKSUM.size


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


class LogWriter:
    """Appends to a new log file. One thread at a time, but for sync()."""

    def __init__(self, path: str, vocab_size: int, tokenizer_fingerprint: str) -> None:
        self.path = path
        self._dtype = token_dtype(vocab_size)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self.size = 0
        self.tokens = 0
        self._write(_header(vocab_size, tokenizer_fingerprint))

    def append(self, namespace: str, document: Document) -> None:
        """Writes a document; OSError if it cannot be, and the file is as it was."""
        tokens = document.tokens.astype(self._dtype)
        payload = _payload(DOCUMENT, document.number, document.digest, namespace)
        self._write(_framed(payload + tokens.tobytes()))
        self.tokens += tokens.size

    def append_deletion(self, deletion: Deletion) -> None:
        """Writes a deletion; OSError if it cannot be, and the file is as it was."""
        digest, namespace = deletion.digest or NO_DIGEST, deletion.namespace or ""
        self._write(_framed(_payload(DELETION, deletion.number, digest, namespace)))

    def sync(self) -> None:
        """Returns when all that was appended is on the disk itself."""
        os.fdatasync(self._file)

    def detached_sync(self) -> Callable[[], None]:
        """sync() of what has been appended until now, for another thread, also after close()."""
        descriptor = os.dup(self._file)

        def sync() -> None:
            try:
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)

        return sync

    def close(self) -> None:
        os.close(self._file)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            os.ftruncate(self._file, self.size)
            raise
        self.size += len(data)


def read_log(path: str, vocab_size: int, tokenizer_fingerprint: str) -> LogContent:
    """All intact records of a log file. DatastoreError if it is another datastore's."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise DatastoreError(f"cannot read log {path}: {error.strerror or error}") from None
    content = LogContent()
    if len(data) < HEADER_BYTES:  # killed before the header was written
        content.damaged_bytes = len(data)
        return content
    header = data[: _HEADER.size]
    if _CHECKSUM.unpack_from(data, _HEADER.size)[0] == zlib.crc32(header):
        _check_header(path, header, vocab_size, tokenizer_fingerprint)
    else:  # the records have checksums of their own: save what can be saved
        content.damaged_bytes = HEADER_BYTES
    _read_records(data, HEADER_BYTES, vocab_size, content)
    return content


class LogTail:
    """Reads a log that another process writes, each record once. One thread at a time."""

    def __init__(self, path: str, vocab_size: int, tokenizer_fingerprint: str) -> None:
        self.path = path
        self._vocab_size = vocab_size
        self._fingerprint = tokenizer_fingerprint
        self._at = 0

    def read(self) -> LogContent:
        """The intact records since the last call; one that is being written comes with the next.

        Raises DatastoreError if it is another datastore's log, or cannot be read;
        FileNotFoundError if its writer has removed it.
        """
        content = LogContent()
        try:
            with open(self.path, "rb") as file:
                if os.fstat(file.fileno()).st_size <= max(self._at, HEADER_BYTES - 1):
                    return content
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            raise
        except OSError as error:
            reason = error.strerror or error
            raise DatastoreError(f"cannot read log {self.path}: {reason}") from None
        start = 0
        if not self._at:
            start, header = HEADER_BYTES, data[: _HEADER.size]
            if _CHECKSUM.unpack_from(data, _HEADER.size)[0] == zlib.crc32(header):
                _check_header(self.path, header, self._vocab_size, self._fingerprint)
        self._at += _read_records(data, start, self._vocab_size, content)
        return content


def _read_records(data: bytes, at: int, vocab_size: int, content: LogContent) -> int:
    """Adds the records from an offset on to `content`; the offset behind the last intact one."""
    dtype = np.dtype(token_dtype(vocab_size))
    marker = _CHECKSUM.pack(_RECORD_MAGIC)
    end = at
    while at < len(data):
        payload = _payload_at(data, at)
        if payload is None:
            following = data.find(marker, at + 1)
            following = len(data) if following < 0 else following
            content.damaged_bytes += following - at
            at = following
            continue
        content.torn_only = content.damaged_bytes == 0
        at += _FRAME.size + len(payload)
        end = at
        kind, number, digest, size = _PAYLOAD.unpack_from(payload)
        namespace = bytes(payload[_PAYLOAD.size : _PAYLOAD.size + size]).decode()
        content.last_number = max(content.last_number, number)
        if kind == DOCUMENT:
            tokens = np.frombuffer(payload[_PAYLOAD.size + size :], dtype).astype(np.int32)
            content.documents.append((namespace, Document(tokens, number, digest)))
        else:
            wanted = None if digest == NO_DIGEST else digest
            content.deletions.append(Deletion(number, namespace or None, wanted))
    return end


def _payload_at(data: bytes, at: int) -> memoryview | None:
    """The payload of the record at an offset, or None if there is no intact one."""
    if at + _FRAME.size > len(data):
        return None
    magic, size, checksum = _FRAME.unpack_from(data, at)
    start = at + _FRAME.size
    if magic != _RECORD_MAGIC or size < _PAYLOAD.size or start + size > len(data):
        return None
    payload = memoryview(data)[start : start + size]
    return payload if zlib.crc32(payload) == checksum else None


def _header(vocab_size: int, tokenizer_fingerprint: str) -> bytes:
    header = _HEADER.pack(MAGIC, VERSION, vocab_size, document_digest(tokenizer_fingerprint))
    return header + _CHECKSUM.pack(zlib.crc32(header))


def _check_header(path: str, header: bytes, vocab_size: int, tokenizer_fingerprint: str) -> None:
    magic, version, stored, digest = _HEADER.unpack(header)
    if magic != MAGIC:
        raise DatastoreError(f"{path} is not a datastore's log: it does not begin with {MAGIC!r}")
    if version != VERSION:
        raise DatastoreError(
            f"log {path} has format version {version}; this program reads {VERSION}"
        )
    if stored != vocab_size or digest != document_digest(tokenizer_fingerprint):
        raise DatastoreError(f"log {path} belongs to a datastore of another tokenizer")


def _payload(kind: int, number: int, digest: bytes, namespace: str) -> bytes:
    encoded = namespace.encode()
    return _PAYLOAD.pack(kind, number, digest, len(encoded)) + encoded


def _framed(payload: bytes) -> bytes:
    if len(payload) > _MAX_PAYLOAD:
        raise DatastoreError(f"a document of {len(payload)} bytes is too long for the log")
    return _FRAME.pack(_RECORD_MAGIC, len(payload), zlib.crc32(payload)) + payload
