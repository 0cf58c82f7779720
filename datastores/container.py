"""A sub-index file: one segment per owner (a namespace, or a corpus), checksummed, never changed.

    offset  content (little-endian)
    0       magic b"TOKSTORE"
    8       u32 version (2), u32 header bytes H, u32 CRC-32 of the header
    20      header: JSON in ASCII, padded with spaces so that 20 + H is a multiple of 4096
    20 + H  sections, in the header's order, each padded with zeros to a multiple of 4096

header: {"vocab_size", "tokenizer_fingerprint", "file_size", "segments": [{"owner", "tokens":
section, "suffixes": section, "landmarks": section, "documents": section}]}; section: {"offset"
from 20 + H, "count" of elements, "crc32" with padding}. Elements: segment.py, Segment. tokens are
uint16 if vocab_size < 65536, else uint32.
"""

import json
import struct
import zlib
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from .config import DatastoreError
from .files import replace_file
from .segment import DOCUMENT_DTYPE, Segment
from .suffix_array import LANDMARK_EVERY, token_dtype

MAGIC = b"TOKSTORE"
VERSION = 2
_PREAMBLE = struct.Struct("<8sIII")
_ALIGNMENT = 4096
_SECTIONS = ("tokens", "suffixes", "landmarks", "documents")


@dataclass(frozen=True)
class Container:
    """What a sub-index file holds."""

    vocab_size: int
    tokenizer_fingerprint: str
    segments: tuple[tuple[str, Segment], ...]
    """(owner, segment), in the file's order."""


def write_container(path: str, content: Container) -> None:
    """Writes to a temporary name in the same folder, syncs, renames. DatastoreError on failure."""
    with replace_file(path) as file:
        _write(file, content)


def _write(file: BinaryIO, content: Container) -> None:
    offset = 0
    entries = []
    for owner, segment in content.segments:
        entry: dict[str, Any] = {"owner": owner}
        for name in _SECTIONS:
            array = getattr(segment, name)
            checksum = zlib.crc32(bytes(_padding(array.nbytes)), zlib.crc32(_bytes(array)))
            entry[name] = {"offset": offset, "count": array.size, "crc32": checksum}
            offset += array.nbytes + _padding(array.nbytes)
        entries.append(entry)
    header = {
        "vocab_size": content.vocab_size,
        "tokenizer_fingerprint": content.tokenizer_fingerprint,
        "file_size": 1 << 60,  # the widest value, so that the real one fits
        "segments": entries,
    }
    length = len(json.dumps(header)) + _PREAMBLE.size
    length += _padding(length)
    header["file_size"] = length + offset
    encoded = json.dumps(header).encode().ljust(length - _PREAMBLE.size)
    file.write(_PREAMBLE.pack(MAGIC, VERSION, len(encoded), zlib.crc32(encoded)))
    file.write(encoded)
    for _, segment in content.segments:
        for name in _SECTIONS:
            array = getattr(segment, name)
            file.write(_bytes(array))
            file.write(bytes(_padding(array.nbytes)))


def read_container(
    path: str, vocab_size: int | None = None, tokenizer_fingerprint: str | None = None
) -> Container:
    """Maps a file into memory and checks all of it; DatastoreError says what is wrong."""
    try:
        raw = np.memmap(path, np.uint8, "r")
    except FileNotFoundError:
        raise DatastoreError(f"there is no sub-index file {path}") from None
    except OSError as error:
        raise DatastoreError(f"cannot read sub-index {path}: {error.strerror or error}") from None
    except ValueError:  # an empty file cannot be mapped
        raise DatastoreError(f"sub-index {path} is truncated: the file is empty") from None
    header, start = _read_header(path, raw)
    stored, fingerprint = header["vocab_size"], header["tokenizer_fingerprint"]
    if vocab_size is not None and stored != vocab_size:
        raise DatastoreError(
            f"sub-index {path} was built for a vocabulary of {stored} tokens, not {vocab_size}: "
            "build it again with this model's tokenizer"
        )
    if tokenizer_fingerprint and fingerprint and fingerprint != tokenizer_fingerprint:
        raise DatastoreError(
            f"sub-index {path} was built with tokenizer {fingerprint!r}, not "
            f"{tokenizer_fingerprint!r}: build it again with this model's tokenizer"
        )
    if raw.size != header["file_size"]:
        raise DatastoreError(
            f"sub-index {path} is truncated or has grown: {raw.size} bytes instead of "
            f"{header['file_size']}"
        )
    segments = [
        (entry["owner"], _read_segment(f"sub-index {path}, segment {i}", raw, start, entry, stored))
        for i, entry in enumerate(header["segments"])
    ]
    return Container(stored, fingerprint, tuple(segments))


def _read_segment(
    where: str, raw: np.ndarray, start: int, entry: dict[str, Any], vocab_size: int
) -> Segment:
    dtypes = (token_dtype(vocab_size), np.int32, np.uint64, DOCUMENT_DTYPE)
    tokens, suffixes, landmarks, documents = (
        _section(f"{where} {name}", raw, start, entry[name], np.dtype(dtype))
        for name, dtype in zip(_SECTIONS, dtypes, strict=True)
    )
    # Compiled searches trust these sizes, so no file may bring others.
    if (
        tokens.size == 0
        or tokens[-1] != vocab_size
        or int(tokens.max()) > vocab_size
        or suffixes.size + documents.size != tokens.size
        or landmarks.size != -(-suffixes.size // LANDMARK_EVERY)
        or (suffixes.size and not 0 <= int(suffixes.min()) <= int(suffixes.max()) < tokens.size)
        or int(documents["start"].max()) >= tokens.size
    ):
        raise DatastoreError(f"{where} is inconsistent: the file was not written by a datastore")
    return Segment(tokens, suffixes, landmarks, documents)


def _read_header(path: str, raw: np.ndarray) -> tuple[dict[str, Any], int]:
    if raw.size < _PREAMBLE.size:
        raise DatastoreError(f"sub-index {path} is truncated: {raw.size} bytes")
    magic, version, size, checksum = _PREAMBLE.unpack(raw[: _PREAMBLE.size].tobytes())
    if magic != MAGIC:
        raise DatastoreError(f"{path} is not a sub-index: it does not begin with {MAGIC!r}")
    if version != VERSION:
        raise DatastoreError(
            f"sub-index {path} has format version {version}; this program reads {VERSION}"
        )
    start = _PREAMBLE.size + size
    if raw.size < start:
        raise DatastoreError(f"sub-index {path} is truncated: its header is incomplete")
    encoded = raw[_PREAMBLE.size : start].tobytes()
    if zlib.crc32(encoded) != checksum:
        raise DatastoreError(f"sub-index {path} is damaged: its header's checksum is wrong")
    return json.loads(encoded), start


def _section(
    where: str, raw: np.ndarray, start: int, entry: dict[str, int], dtype: np.dtype
) -> np.ndarray:
    first = start + entry["offset"]
    nbytes = entry["count"] * dtype.itemsize
    padded = raw[first : first + nbytes + _padding(nbytes)]
    if padded.size != nbytes + _padding(nbytes) or zlib.crc32(padded.data) != entry["crc32"]:
        raise DatastoreError(f"{where} are damaged: the checksum is wrong")
    # As plain arrays: they keep the mapping alive, and compiled code takes their addresses.
    return np.asarray(padded[:nbytes]).view(dtype)


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).data


def _padding(size: int) -> int:
    return -size % _ALIGNMENT
