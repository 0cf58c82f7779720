"""Logs of format version 1, which are read and not written any more.

    offset  content (little-endian)
    0       magic b"TOKENLOG", u32 version (1), u32 vocabulary size, 16 bytes: digest of the
            tokenizer fingerprint (zeros: none), u32 CRC-32 of these 32 bytes
    36      records: u32 0x4C4F4752, u32 payload bytes, u32 CRC-32 of the payload, payload

Payloads are those of wal.py. The checksums have no key, and served tokens can hold bytes that look
like a record: so records are read from the first one on, each where the one before it ends, and
never looked for elsewhere. A damaged record is passed over by its size; if the next one does not
begin there, the rest is not taken.
"""

import struct
import zlib

import numpy as np

from .records import PAYLOAD_BYTES, LogContent, add_payload
from .suffix_array import token_dtype

HEADER_BYTES = 36
_CHECKSUM = struct.Struct("<I")
_FRAME = struct.Struct("<III")
_RECORD_MAGIC = 0x4C4F4752
_MARKER = _CHECKSUM.pack(_RECORD_MAGIC)


def intact_header(data: bytes) -> bool:
    """Whether a log begins with a header of version 1's size that has its checksum."""
    if len(data) < HEADER_BYTES:
        return False
    checksum = _CHECKSUM.unpack_from(data, HEADER_BYTES - _CHECKSUM.size)[0]
    return checksum == zlib.crc32(data[: HEADER_BYTES - _CHECKSUM.size])


def looks_like(data: bytes) -> bool:
    """Whether it is a log of version 1, its header damaged maybe.

    In later versions random bytes stand where its first record begins.
    """
    return intact_header(data) or data[HEADER_BYTES : HEADER_BYTES + len(_MARKER)] == _MARKER


def read_records(data: bytes, at: int, vocab_size: int, content: LogContent) -> int:
    """Adds the records from an offset on to `content`; the offset behind the last intact one."""
    dtype = np.dtype(token_dtype(vocab_size))
    end = at
    while at + _FRAME.size <= len(data):
        magic, size, checksum = _FRAME.unpack_from(data, at)
        start = at + _FRAME.size
        if magic != _RECORD_MAGIC or size < PAYLOAD_BYTES or start + size > len(data):
            break
        payload = memoryview(data)[start : start + size]
        at = start + size
        if zlib.crc32(payload) != checksum or not add_payload(payload, dtype, vocab_size, content):
            content.damaged_bytes += _FRAME.size + size
            continue
        content.torn_only = content.damaged_bytes == 0
        end = at
    content.damaged_bytes += len(data) - at
    return end
