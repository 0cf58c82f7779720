"""A sub-index file: one segment per owner (a namespace, or a corpus), checksummed, never changed.

    offset  content (little-endian)
    0       magic b"TOKSTORE"
    8       u32 version (3), u32 header bytes H, u32 CRC-32 of the header
    20      header: JSON in ASCII, padded with spaces so that 20 + H is a multiple of 16
    20 + H  sections, in the header's order, each padded with zeros to a multiple of 16

header: {"vocab_size", "tokenizer_fingerprint", "file_size", "segments": [{"owner", "tokens":
section, "suffixes": section, "landmarks": section, "documents": section}]}; section: {"offset"
from 20 + H, "count" of elements, "crc32" with padding}. Elements: segment.py, Segment. tokens are
uint16 if vocab_size < 65536, else uint32. Version 2, which is read too, has multiples of 4096
instead of 16: 16 KiB for each segment.
"""

import json
import struct
import zlib
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from .config import DatastoreError
from .files import open_file, replace_file
from .manifest import MAX_VOCAB_SIZE, is_name, is_text, is_whole
from .segment import DOCUMENT_DTYPE, NUMBER_LIMIT, Segment
from .suffix_array import LANDMARK_EVERY, token_dtype

MAGIC = b"TOKSTORE"
VERSION = 3
_PREAMBLE = struct.Struct("<8sIII")
_ALIGNMENT = {2: 4096, 3: 16}
_MAX_FILE_BYTES = 1 << 60
_CHECKED_BYTES = 1 << 20
_MAX_ELEMENTS = 1 << 31
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
        write_sections(file, content)


def write_sections(file: BinaryIO, content: Container) -> None:
    """Writes the whole file, from where it stands; OSError if it cannot."""
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
        "file_size": _MAX_FILE_BYTES,  # the widest value, so that the real one fits
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
        with open_file(path) as file:
            return map_container(file, path, vocab_size, tokenizer_fingerprint)
    except FileNotFoundError:
        raise DatastoreError(f"there is no sub-index file {path}") from None


def map_container(
    file: BinaryIO,
    path: str,
    vocab_size: int | None = None,
    tokenizer_fingerprint: str | None = None,
) -> Container:
    """As read_container(), of a file that is open; path: what messages call it."""
    try:
        # As a plain array, which keeps the mapping alive: a memmap's slices cost three times.
        raw = np.asarray(np.memmap(file, np.uint8, "r"))
    except OSError as error:
        raise DatastoreError(f"cannot read sub-index {path}: {error.strerror or error}") from None
    except ValueError:  # an empty file cannot be mapped
        raise DatastoreError(f"sub-index {path} is truncated: the file is empty") from None
    header, start, alignment = _read_header(path, raw)
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
        (
            entry["owner"],
            _read_segment(f"sub-index {path}, segment {i}", raw[start:], entry, stored, alignment),
        )
        for i, entry in enumerate(header["segments"])
    ]
    return Container(stored, fingerprint, tuple(segments))


def read_outline(path: str) -> tuple[int, str, list[tuple[str, int]]]:
    """(vocabulary size, tokenizer fingerprint, (owner, tokens) of each segment) of a file, from its
    header alone. DatastoreError says what is wrong with that."""
    try:
        with open_file(path) as file:
            raw = np.asarray(np.memmap(file, np.uint8, "r"))
    except (OSError, ValueError) as error:
        raise DatastoreError(f"cannot read sub-index {path}: {error}") from None
    header, _, _ = _read_header(path, raw)
    if raw.size != header["file_size"]:
        raise DatastoreError(f"sub-index {path} is truncated or has grown: {raw.size} bytes")
    segments = [(entry["owner"], entry["suffixes"]["count"]) for entry in header["segments"]]
    return header["vocab_size"], header["tokenizer_fingerprint"], segments


def _read_segment(
    where: str, raw: np.ndarray, entry: dict[str, Any], vocab_size: int, alignment: int
) -> Segment:
    dtypes = (token_dtype(vocab_size), np.int32, np.uint64, DOCUMENT_DTYPE)
    tokens, suffixes, landmarks, documents = (
        _section(f"{where} {name}", raw, entry[name], np.dtype(dtype), alignment)
        for name, dtype in zip(_SECTIONS, dtypes, strict=True)
    )
    # Compiled searches trust these sizes, so no file may bring others.
    if (
        suffixes.size == 0
        or documents.size == 0
        or suffixes.size + documents.size != tokens.size
        or landmarks.size != -(-suffixes.size // LANDMARK_EVERY)
        or int(tokens.max()) > vocab_size
        or not 0 <= int(suffixes.min()) <= int(suffixes.max()) < tokens.size
        or int(documents["number"].max()) >= NUMBER_LIMIT
        or not _separates(tokens, documents["start"], vocab_size)
    ):
        raise DatastoreError(f"{where} is inconsistent: the file was not written by a datastore")
    return Segment(tokens, suffixes, landmarks, documents)


def _separates(tokens: np.ndarray, starts: np.ndarray, separator: int) -> bool:
    """Whether each document begins where the separator of the one before it ends."""
    ends = np.flatnonzero(tokens == separator)
    return (
        ends.size == starts.size
        and int(ends[-1]) == tokens.size - 1
        and int(starts[0]) == 0
        and np.array_equal(ends[:-1] + 1, starts[1:])
    )


def _read_header(path: str, raw: np.ndarray) -> tuple[dict[str, Any], int, int]:
    """(the header, with every field checked; the offset behind it; the alignment)."""
    if raw.size < _PREAMBLE.size:
        raise DatastoreError(f"sub-index {path} is truncated: {raw.size} bytes")
    magic, version, size, checksum = _PREAMBLE.unpack(raw[: _PREAMBLE.size].tobytes())
    if magic != MAGIC:
        raise DatastoreError(f"{path} is not a sub-index: it does not begin with {MAGIC!r}")
    if version not in _ALIGNMENT:
        raise DatastoreError(
            f"sub-index {path} has format version {version}; this program reads 2 and {VERSION}"
        )
    start = _PREAMBLE.size + size
    if raw.size < start:
        raise DatastoreError(f"sub-index {path} is truncated: its header is incomplete")
    encoded = raw[_PREAMBLE.size : start].tobytes()
    if zlib.crc32(encoded) != checksum:
        raise DatastoreError(f"sub-index {path} is damaged: its header's checksum is wrong")
    try:
        header = json.loads(encoded)
    except (ValueError, RecursionError):
        header = None
    problem = _header_problem(header)
    if problem is not None:
        raise DatastoreError(f"sub-index {path} is not one that a datastore writes: {problem}")
    return header, start, _ALIGNMENT[version]


def _header_problem(header: object) -> str | None:
    """The first field that is not as write_sections() makes it; None: all are."""
    fields = {"vocab_size", "tokenizer_fingerprint", "file_size", "segments"}
    if not isinstance(header, dict) or header.keys() != fields:
        return "its header must have " + ", ".join(sorted(fields))
    if not is_whole(header["vocab_size"], 1, MAX_VOCAB_SIZE):
        return f"vocab_size must be a whole number of 1 to {MAX_VOCAB_SIZE}"
    if not is_text(header["tokenizer_fingerprint"]):
        return "tokenizer_fingerprint must be a text"
    if not is_whole(header["file_size"], 0, _MAX_FILE_BYTES):
        return "file_size must be a whole number"
    if not isinstance(header["segments"], list) or not header["segments"]:
        return "segments must be a list, and not empty"
    for i, entry in enumerate(header["segments"]):
        if not isinstance(entry, dict) or entry.keys() != {"owner", *_SECTIONS}:
            return f"segments[{i}] must have owner, " + ", ".join(_SECTIONS)
        if not is_name(entry["owner"]):
            return f"segments[{i}].owner must be a name"
        if not all(_is_section(entry[name]) for name in _SECTIONS):
            return f"segments[{i}] must have an offset, count and crc32 for each section"
    return None


def _is_section(section: object) -> bool:
    return (
        isinstance(section, dict)
        and section.keys() == {"offset", "count", "crc32"}
        and is_whole(section["offset"], 0, _MAX_FILE_BYTES)
        and is_whole(section["count"], 1, _MAX_ELEMENTS)
        and is_whole(section["crc32"], 0, (1 << 32) - 1)
    )


def _section(
    where: str, raw: np.ndarray, entry: dict[str, int], dtype: np.dtype, alignment: int
) -> np.ndarray:
    first = entry["offset"]
    nbytes = entry["count"] * dtype.itemsize
    if first % alignment:  # compiled searches read whole words
        raise DatastoreError(f"{where} must begin at a multiple of {alignment}")
    padded = raw[first : first + nbytes + -nbytes % alignment]
    if padded.size != nbytes + -nbytes % alignment or _crc32(padded.data) != entry["crc32"]:
        raise DatastoreError(f"{where} are damaged: the checksum is wrong")
    return padded[:nbytes].view(dtype)


def _crc32(data: memoryview) -> int:
    """In pieces, so that a process which steps aside for others can rest in between."""
    checksum = 0
    for at in range(0, len(data), _CHECKED_BYTES):
        checksum = zlib.crc32(data[at : at + _CHECKED_BYTES], checksum)
    return checksum


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).data


def _padding(size: int) -> int:
    return -size % _ALIGNMENT[VERSION]
