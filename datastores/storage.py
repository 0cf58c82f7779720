"""The datastore's file: one file, checksummed, replaced in one step.

    offset  content (little-endian)
    0       magic b"TOKSTORE"
    8       u32 version (1), u32 header bytes H, u32 CRC-32 of the header
    20      header: JSON in ASCII, padded with spaces so that 20 + H is a multiple of 4096
    20 + H  sections, in the header's order, each padded with zeros to a multiple of 4096

header: {"vocab_size", "tokenizer_fingerprint", "file_size", "segments": [{"corpus": name or null
for the live collection, "documents", "tokens": section, "suffixes": section}]}, oldest segment
first; section: {"offset" from 20 + H, "count" of elements, "crc32" with padding}. tokens are
uint16 if vocab_size < 65536, else uint32; suffixes are int32 (suffix_array.py).
"""

import contextlib
import json
import os
import struct
import tempfile
import zlib
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from .config import DatastoreError
from .segment import Segment
from .suffix_array import token_dtype

MAGIC = b"TOKSTORE"
VERSION = 1
_PREAMBLE = struct.Struct("<8sIII")
_ALIGNMENT = 4096


@dataclass(frozen=True)
class StoredDatastore:
    """What a file holds."""

    vocab_size: int
    tokenizer_fingerprint: str
    live: tuple[Segment, ...]
    corpora: dict[str, tuple[Segment, ...]]


def write_datastore(path: str | os.PathLike[str], content: StoredDatastore) -> None:
    """Writes to a temporary name in the same folder, syncs, renames. DatastoreError on failure."""
    path = os.path.abspath(path)
    folder = os.path.dirname(path)
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=os.path.basename(path) + ".", dir=folder)
        with os.fdopen(descriptor, "wb") as file:
            _write(file, content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        temporary = None
        _sync_folder(folder)
    except OSError as error:
        raise DatastoreError(f"cannot write datastore {path}: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _write(file: BinaryIO, content: StoredDatastore) -> None:
    segments: list[tuple[str | None, Segment]] = [
        (name, segment) for name, group in content.corpora.items() for segment in group
    ]
    segments += [(None, segment) for segment in content.live]
    offset = 0

    def section(array: np.ndarray) -> dict[str, int]:
        nonlocal offset
        checksum = zlib.crc32(bytes(_padding(array.nbytes)), zlib.crc32(array.data))
        entry = {"offset": offset, "count": array.size, "crc32": checksum}
        offset += array.nbytes + _padding(array.nbytes)
        return entry

    header: dict[str, Any] = {
        "vocab_size": content.vocab_size,
        "tokenizer_fingerprint": content.tokenizer_fingerprint,
        "segments": [
            {
                "corpus": name,
                "documents": segment.documents,
                "tokens": section(segment.tokens),
                "suffixes": section(segment.suffixes),
            }
            for name, segment in segments
        ],
        "file_size": 0,
    }
    # The file's size is in the header and the header's size in the file's: room for its digits.
    size = len(json.dumps(header)) + 20
    size += _padding(_PREAMBLE.size + size)
    header["file_size"] = _PREAMBLE.size + size + offset
    encoded = json.dumps(header).encode("ascii").ljust(size)
    file.write(_PREAMBLE.pack(MAGIC, VERSION, size, zlib.crc32(encoded)))
    file.write(encoded)
    for _, segment in segments:
        for array in (segment.tokens, segment.suffixes):
            file.write(array.data)
            file.write(bytes(_padding(array.nbytes)))


def read_datastore(
    path: str | os.PathLike[str],
    vocab_size: int | None = None,
    tokenizer_fingerprint: str | None = None,
) -> StoredDatastore:
    """Maps a file into memory and checks all of it; DatastoreError says what is wrong."""
    try:
        raw = np.memmap(path, np.uint8, "r")
    except FileNotFoundError:
        raise DatastoreError(f"there is no datastore file {path}") from None
    except OSError as error:
        raise DatastoreError(f"cannot read datastore {path}: {error.strerror or error}") from None
    except ValueError:  # an empty file cannot be mapped
        raise DatastoreError(f"datastore {path} is truncated: the file is empty") from None
    header, start = _read_header(path, raw)
    stored, fingerprint = header["vocab_size"], header["tokenizer_fingerprint"]
    if vocab_size is not None and stored != vocab_size:
        raise DatastoreError(
            f"datastore {path} was built for a vocabulary of {stored} tokens, not {vocab_size}: "
            "build it again with this model's tokenizer"
        )
    if tokenizer_fingerprint and fingerprint and fingerprint != tokenizer_fingerprint:
        raise DatastoreError(
            f"datastore {path} was built with tokenizer {fingerprint!r}, not "
            f"{tokenizer_fingerprint!r}: build it again with this model's tokenizer"
        )
    if raw.size != header["file_size"]:
        raise DatastoreError(
            f"datastore {path} is truncated or has grown: {raw.size} bytes instead of "
            f"{header['file_size']}"
        )
    live: list[Segment] = []
    corpora: dict[str, list[Segment]] = {}
    for index, entry in enumerate(header["segments"]):
        where = f"datastore {path}, segment {index}"
        tokens = _section(where + " tokens", raw, start, entry["tokens"], token_dtype(stored))
        suffixes = _section(where + " suffixes", raw, start, entry["suffixes"], np.int32)
        # Compiled searches do not check bounds, so no file may bring an index out of range.
        if (
            tokens.size == 0
            or tokens[-1] != stored
            or int(tokens.max()) > stored
            or suffixes.size != int(np.count_nonzero(tokens != stored))
            or (suffixes.size and not 0 <= int(suffixes.min()) <= int(suffixes.max()) < tokens.size)
        ):
            raise DatastoreError(f"{where} is inconsistent: the file was not written by save()")
        segment = Segment(tokens, suffixes, entry["documents"])
        name = entry["corpus"]
        (live if name is None else corpora.setdefault(name, [])).append(segment)
    frozen = {name: tuple(group) for name, group in corpora.items()}
    return StoredDatastore(stored, fingerprint, tuple(live), frozen)


def _read_header(path: str | os.PathLike[str], raw: np.ndarray) -> tuple[dict[str, Any], int]:
    if raw.size < _PREAMBLE.size:
        raise DatastoreError(f"datastore {path} is truncated: {raw.size} bytes")
    magic, version, size, checksum = _PREAMBLE.unpack(raw[: _PREAMBLE.size].tobytes())
    if magic != MAGIC:
        raise DatastoreError(f"{path} is not a datastore: it does not begin with {MAGIC!r}")
    if version != VERSION:
        raise DatastoreError(
            f"datastore {path} has format version {version}; this program reads {VERSION}"
        )
    start = _PREAMBLE.size + size
    if raw.size < start:
        raise DatastoreError(f"datastore {path} is truncated: its header is incomplete")
    encoded = raw[_PREAMBLE.size : start].tobytes()
    if zlib.crc32(encoded) != checksum:
        raise DatastoreError(f"datastore {path} is damaged: its header's checksum is wrong")
    return json.loads(encoded), start


def _section(
    where: str, raw: np.ndarray, start: int, entry: dict[str, int], dtype: type[np.generic]
) -> np.ndarray:
    first = start + entry["offset"]
    nbytes = entry["count"] * np.dtype(dtype).itemsize
    padded = raw[first : first + nbytes + _padding(nbytes)]
    if padded.size != nbytes + _padding(nbytes) or zlib.crc32(padded.data) != entry["crc32"]:
        raise DatastoreError(f"{where} are damaged: the checksum is wrong")
    # As plain arrays: they keep the mapping alive, and compiled code takes their addresses.
    return np.asarray(padded[:nbytes]).view(dtype)


def _padding(size: int) -> int:
    return -size % _ALIGNMENT


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
