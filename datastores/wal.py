"""The write-ahead log: what was acknowledged is in it, whatever kills the process.

    offset  content (little-endian)
    0       magic b"TOKENLOG", u32 version (2), u32 vocabulary size, 16 bytes: digest of the
            tokenizer fingerprint (zeros: none), 16 bytes key, u32 CRC-32 of these 48 bytes
    52      records

A record: 4 bytes marker (the key's first), u32 payload bytes, 8 bytes BLAKE2b of the record's
offset (u64) and payload under the key, payload. A payload: u8 kind (1 document, 2 deletion), u64
number, 16 bytes digest, u16 bytes of the namespace, namespace in UTF-8, tokens (uint16 or uint32,
as token_dtype says; none in a deletion). Numbers rise from record to record. A deletion takes away
what came before it: of its namespace (empty: of all), with its digest (zeros: all). Each record is
one write() call.

The key is random, and one log's own. Served tokens can hold any bytes, those of a record too; but
whoever chose them did not know the key, so no reader takes what lies inside a record for another.
wal_v1.py reads the logs of version 1, which have no key.
"""

import hashlib
import os
import secrets
import struct
import zlib
from collections.abc import Callable

import numpy as np

from . import wal_v1
from .config import DatastoreError
from .files import create_locked, open_file
from .records import (
    NUMBER_LIMIT,
    Deletion,
    LogContent,
    add_payload,
    deletion_payload,
    document_payload,
)
from .segment import Document, document_digest
from .suffix_array import token_dtype

__all__ = ["NUMBER_LIMIT", "Deletion", "LogContent", "LogTail", "LogWriter", "read_log"]

MAGIC = b"TOKENLOG"
VERSION = 2
_PREFIX = struct.Struct("<8sII16s")
_HEADER = struct.Struct("<8sII16s16s")
_CHECKSUM = struct.Struct("<I")
_FRAME = struct.Struct("<4sI8s")
_OFFSET = struct.Struct("<Q")
_MARKER_BYTES = 4
_MAX_PAYLOAD = 1 << 31
_MAX_LOG_BYTES = 1 << 34
HEADER_BYTES = _HEADER.size + _CHECKSUM.size


class LogWriter:
    """Appends to a new log file. One thread at a time, but for sync().

    locked: others can see whether it is written to (files.is_locked()), until close() or a kill.
    """

    def __init__(
        self, path: str, vocab_size: int, tokenizer_fingerprint: str, locked: bool = False
    ) -> None:
        self.path = path
        self._dtype = token_dtype(vocab_size)
        self._file = create_locked(path) if locked else _create(path)
        self.size = 0
        self.tokens = 0
        self.failed: OSError | None = None
        """Why nothing can be appended any more: what is on the disk is not known."""
        self._key, header = new_header(vocab_size, tokenizer_fingerprint)
        try:
            self._write(header)
        except OSError:
            os.close(self._file)
            raise

    def append(self, namespace: str, document: Document) -> None:
        """Writes a document; OSError if it cannot be, and the file is as it was."""
        self._write(
            framed(self._key, self.size, document_payload(namespace, document, self._dtype))
        )
        self.tokens += document.tokens.size

    def append_deletion(self, deletion: Deletion) -> None:
        """Writes a deletion; OSError if it cannot be, and the file is as it was."""
        self._write(framed(self._key, self.size, deletion_payload(deletion)))

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
        if self.failed is not None:
            raise self.failed
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            try:
                os.ftruncate(self._file, self.size)
            except OSError as error:  # the next record would not be where its checksum says
                self.failed = error
            raise
        self.size += len(data)


def _create(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)


def log_bytes(
    vocab_size: int,
    tokenizer_fingerprint: str,
    documents: list[tuple[str, Document]],
    deletions: list[Deletion],
) -> bytes:
    """A whole log file with a key of its own, its records in the order of their numbers."""
    key, log = new_header(vocab_size, tokenizer_fingerprint)
    dtype = token_dtype(vocab_size)
    records = [(d.number, document_payload(name, d, dtype)) for name, d in documents]
    records += [(d.number, deletion_payload(d)) for d in deletions]
    parts, size = [log], len(log)
    for _, payload in sorted(records, key=lambda record: record[0]):
        parts.append(framed(key, size, payload))
        size += len(parts[-1])
    return b"".join(parts)


def read_log(path: str, vocab_size: int, tokenizer_fingerprint: str) -> LogContent:
    """All intact records of a log file. DatastoreError if it is another datastore's."""
    try:
        data = _read_from(path, 0)
    except FileNotFoundError:
        raise DatastoreError(f"cannot read log {path}: it is not there") from None
    content = LogContent()
    if len(data) < HEADER_BYTES and not wal_v1.looks_like(data):
        content.damaged_bytes = len(data)  # killed before the header was written
        return content
    if _is_v1(path, data, vocab_size, tokenizer_fingerprint):
        wal_v1.read_records(data, wal_v1.HEADER_BYTES, vocab_size, content)
        return content
    key, intact = _key_of(path, data, vocab_size, tokenizer_fingerprint)
    if not intact:  # the records have checksums of their own: save what can be saved
        content.damaged_bytes = HEADER_BYTES
    _read_records(data, 0, HEADER_BYTES, key, vocab_size, content)
    return content


class LogTail:
    """Reads a log that another process writes, each record once. One thread at a time."""

    def __init__(self, path: str, vocab_size: int, tokenizer_fingerprint: str) -> None:
        self.path = path
        self._vocab_size = vocab_size
        self._fingerprint = tokenizer_fingerprint
        self._at = 0
        self._key: bytes | None = None
        self._header = b""
        self._last_number = -1

    def read(self) -> LogContent:
        """The intact records since the last call; one that is being written comes with the next.

        A log that was written anew under its name is read on after the records known.
        Raises DatastoreError if it is another datastore's log, or cannot be read;
        FileNotFoundError if its writer has removed it.
        """
        found = LogContent()
        data = self._new_bytes()
        if not data:
            return found
        start = 0
        if not self._at:
            if _is_v1(self.path, data, self._vocab_size, self._fingerprint):
                self._key, start = None, wal_v1.HEADER_BYTES
            else:
                key, _ = _key_of(self.path, data, self._vocab_size, self._fingerprint)
                self._key, start = key, HEADER_BYTES
            self._header = data[:HEADER_BYTES]
        if self._key is None:
            self._at += wal_v1.read_records(data, start, self._vocab_size, found)
        else:
            self._at += _read_records(
                data, self._at, start, self._key, self._vocab_size, found, follows=True
            )
        return self._unseen(found)

    def _new_bytes(self) -> bytes:
        """What has come since, from the beginning in a log that is another one now."""
        if self._at and _read_from(self.path, 0, len(self._header)) != self._header:
            self._at = 0
        data = _read_from(self.path, self._at)
        if not self._at and len(data) < HEADER_BYTES:
            return b""
        return data

    def _unseen(self, content: LogContent) -> LogContent:
        """Without what an earlier reading of this log has given already."""
        last = self._last_number
        content.documents = [(n, d) for n, d in content.documents if d.number > last]
        content.deletions = [d for d in content.deletions if d.number > last]
        self._last_number = max(last, content.last_number)
        return content


def new_header(vocab_size: int, tokenizer_fingerprint: str) -> tuple[bytes, bytes]:
    """(a random key, the header of a log that has it)."""
    digest = document_digest(tokenizer_fingerprint)
    while True:
        key = secrets.token_bytes(16)
        header = _HEADER.pack(MAGIC, VERSION, vocab_size, digest, key)
        header += _CHECKSUM.pack(zlib.crc32(header))
        if not wal_v1.looks_like(header):
            return key, header


def framed(key: bytes, offset: int, payload: bytes) -> bytes:
    """The record of a payload at an offset of a log."""
    if len(payload) > _MAX_PAYLOAD:
        raise DatastoreError(f"a document of {len(payload)} bytes is too long for the log")
    checksum = _keyed(key, offset, payload)
    return _FRAME.pack(key[:_MARKER_BYTES], len(payload), checksum) + payload


def _read_records(
    data: bytes,
    base: int,
    at: int,
    key: bytes,
    vocab_size: int,
    content: LogContent,
    follows: bool = False,
) -> int:
    """Adds the records from an offset on; the offset behind the last intact one.

    base: offset of data in the file. follows: the file is being written, so that a record that
    goes beyond its end is waited for.
    """
    dtype = np.dtype(token_dtype(vocab_size))
    marker = key[:_MARKER_BYTES]
    end = at
    while at < len(data):
        if follows and _is_incomplete(data, at, marker):
            break
        payload = _payload_at(data, base, at, key)
        if payload is None or not add_payload(payload, dtype, vocab_size, content):
            following = data.find(marker, at + 1)
            following = len(data) if following < 0 else following
            content.damaged_bytes += following - at
            at = following
            continue
        content.torn_only = content.damaged_bytes == 0
        at += _FRAME.size + len(payload)
        end = at
    return end


def _is_incomplete(data: bytes, at: int, marker: bytes) -> bool:
    if at + _FRAME.size > len(data):
        return True
    found, size, _ = _FRAME.unpack_from(data, at)
    return found == marker and size <= _MAX_PAYLOAD and at + _FRAME.size + size > len(data)


def _payload_at(data: bytes, base: int, at: int, key: bytes) -> memoryview | None:
    """The payload of the record at an offset, or None if there is no intact one."""
    if at + _FRAME.size > len(data):
        return None
    marker, size, checksum = _FRAME.unpack_from(data, at)
    start = at + _FRAME.size
    if marker != key[:_MARKER_BYTES] or start + size > len(data):
        return None
    payload = memoryview(data)[start : start + size]
    return payload if _keyed(key, base + at, payload) == checksum else None


def _keyed(key: bytes, offset: int, payload: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(_OFFSET.pack(offset), key=key, digest_size=8)
    digest.update(payload)
    return digest.digest()


def _is_v1(path: str, data: bytes, vocab_size: int, tokenizer_fingerprint: str) -> bool:
    """Whether it is a log of version 1, which then is this datastore's."""
    if not wal_v1.looks_like(data):
        return False
    if wal_v1.intact_header(data):
        _check_header(path, data, 1, vocab_size, tokenizer_fingerprint)
    return True


def _key_of(
    path: str, data: bytes, vocab_size: int, tokenizer_fingerprint: str
) -> tuple[bytes, bool]:
    """(the log's key, whether its header is intact)."""
    header = data[: _HEADER.size]
    intact = _CHECKSUM.unpack_from(data, _HEADER.size)[0] == zlib.crc32(header)
    if intact:
        _check_header(path, data, VERSION, vocab_size, tokenizer_fingerprint)
    return header[-16:], intact


def _check_header(
    path: str, data: bytes, expected: int, vocab_size: int, tokenizer_fingerprint: str
) -> None:
    magic, version, stored, digest = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise DatastoreError(f"{path} is not a datastore's log: it does not begin with {MAGIC!r}")
    if version != expected:
        raise DatastoreError(
            f"log {path} has format version {version}; this program reads 1 and {VERSION}"
        )
    if stored != vocab_size or digest != document_digest(tokenizer_fingerprint):
        raise DatastoreError(f"log {path} belongs to a datastore of another tokenizer")


def _read_from(path: str, offset: int, size: int = -1) -> bytes:
    """A file's bytes from an offset on. FileNotFoundError, or DatastoreError with the reason."""
    with open_file(path) as file:
        try:
            if os.fstat(file.fileno()).st_size > _MAX_LOG_BYTES:
                raise DatastoreError(
                    f"log {path} has more than {_MAX_LOG_BYTES} bytes, which no datastore writes: "
                    "move it away"
                )
            file.seek(offset)
            return file.read(size)
        except OSError as error:
            raise DatastoreError(f"cannot read log {path}: {error.strerror or error}") from None
        except MemoryError:
            raise DatastoreError(f"cannot read log {path}: it does not fit the memory") from None
