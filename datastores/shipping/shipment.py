"""DATASTORE.json: what lies at an address, and the checksum of every block of it.

{"format": "sglang-ext datastore, shipped", "version": 1, "sha256": of the canonical dump of
content, "content": the fields of Shipment}. It is written last, so that what it names is there. A
sub-index file of more than piece_bytes lies in pieces, NAME.0000 and so on, the longest part of an
upload that an interruption costs. A block's checksum is XXH3 (128 bits): it shows damage, not who
wrote a file.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from ..config import DatastoreError
from ..manifest import (
    FILE_NUMBER_LIMIT,
    MAX_VOCAB_SIZE,
    FileEntry,
    Manifest,
    is_file_name,
    is_name,
    is_text,
    is_whole,
)
from ..segment import NUMBER_LIMIT
from .card import Card, card_of

NAME = "DATASTORE.json"
VERSION = 1
BLOCK_BYTES = 1 << 24
PIECE_BYTES = 1 << 28
MAX_BYTES = 1 << 26
_FORMAT = "sglang-ext datastore, shipped"
_MAX_FILE_BYTES = 1 << 60
_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)
_PIECE = re.compile(r"(sub-[0-9-]+(?:[0-9a-f]{8})?\.idx)\.([0-9]{4})", re.ASCII)


@dataclass(frozen=True)
class ShippedFile:
    """A sub-index file at an address."""

    name: str
    tokens: int
    corpus: str | None
    nbytes: int
    blocks: tuple[str, ...]
    """The checksum of each block."""

    @property
    def entry(self) -> FileEntry:
        return FileEntry(self.name, self.tokens, self.corpus)


@dataclass(frozen=True)
class Shipment:
    """What lies at an address."""

    vocab_size: int
    tokenizer_fingerprint: str
    next_number: int
    created: str
    documents: int
    namespaces: int
    """Namespaces whose served outputs are in it; their names are in the files alone."""
    block_bytes: int
    piece_bytes: int
    card: Card
    files: tuple[ShippedFile, ...]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def tokens(self) -> int:
        return sum(file.tokens for file in self.files)

    @property
    def manifest(self) -> Manifest:
        """The manifest of a folder with its files."""
        numbers = [int(file.name.split("-")[1].split(".")[0]) for file in self.files]
        return Manifest(
            self.vocab_size,
            self.tokenizer_fingerprint,
            tuple(file.entry for file in self.files),
            next_file=1 + max(numbers, default=0),
            next_number=self.next_number,
        )

    def pieces(self, file: ShippedFile) -> list[tuple[str, int]]:
        """(name, bytes) of the objects that a file lies in."""
        return pieces_of(file.name, file.nbytes, self.piece_bytes)

    def to_json(self) -> bytes:
        content = json.loads(json.dumps(asdict(self)))
        head = {"format": _FORMAT, "version": VERSION, "sha256": _digest(content)}
        return json.dumps({**head, "content": content}, indent=1).encode() + b"\n"

    @property
    def identity(self) -> str:
        """A digest of all of it."""
        return _digest(json.loads(json.dumps(asdict(self))))


def pieces_of(name: str, nbytes: int, piece_bytes: int) -> list[tuple[str, int]]:
    """(name, bytes) of the objects that a file of that size lies in."""
    if nbytes <= piece_bytes:
        return [(name, nbytes)]
    sizes = [min(piece_bytes, nbytes - at) for at in range(0, nbytes, piece_bytes)]
    return [(f"{name}.{i:04d}", size) for i, size in enumerate(sizes)]


def is_piece(name: str) -> bool:
    """Whether an object of that name holds a sub-index file or a piece of one."""
    found = _PIECE.fullmatch(name)
    return is_file_name(found[1] if found else name)


def block_digest(block: bytes | memoryview) -> str:
    """The checksum of a block."""
    return xxhash.xxh3_128_hexdigest(block)


def read_shipment(text: bytes, where: str) -> Shipment:
    """The shipment of a DATASTORE.json; where: what messages call it.

    DatastoreError: it is damaged, of a newer program, or says what no datastore says: no file of it
    is to be touched then.
    """
    try:
        stored = json.loads(text)
        if stored["format"] != _FORMAT:
            raise ValueError
        version = stored["version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DatastoreError(
            f"{where} is damaged, or no datastore's: push the datastore there again"
        ) from None
    if version != VERSION:
        hint = "; a newer sglang-ext wrote it: update this one" if newer(version) else ""
        raise DatastoreError(
            f"{where} has format version {str(version)[:20]}; this program reads {VERSION}{hint}"
        )
    content = stored.get("content")
    if stored.get("sha256") != _digest(content):
        raise DatastoreError(
            f"{where} is damaged: its checksum is wrong; push the datastore there again"
        )
    try:
        return _shipment_of(content)
    except ValueError as error:
        raise DatastoreError(f"{where} is not one that a datastore writes: {error}") from None


def newer(version: object) -> bool:
    """Whether it is the version of a program that is still to come."""
    return is_whole(version, VERSION + 1, 1 << 30)


def _shipment_of(content: Any) -> Shipment:
    """Every field checked. ValueError says which one is wrong."""
    if not isinstance(content, dict) or content.keys() != set(Shipment.__dataclass_fields__):
        raise ValueError("its fields are others")
    for name, low, high in (
        ("vocab_size", 1, MAX_VOCAB_SIZE),
        ("next_number", 0, NUMBER_LIMIT),
        ("documents", 0, NUMBER_LIMIT),
        ("namespaces", 0, NUMBER_LIMIT),
        ("block_bytes", 1 << 10, 1 << 28),
        ("piece_bytes", 1 << 10, 1 << 40),
    ):
        if not is_whole(content[name], low, high):
            raise ValueError(f"{name} must be a whole number of {low} to {high}")
    if content["piece_bytes"] % content["block_bytes"]:
        raise ValueError("piece_bytes must be a multiple of block_bytes")
    for name in ("tokenizer_fingerprint", "created"):
        if not is_text(content[name]):
            raise ValueError(f"{name} must be a text")
    files = content["files"]
    if not isinstance(files, list):
        raise ValueError("files must be a list")
    found = tuple(_file_of(entry, i, content["block_bytes"]) for i, entry in enumerate(files))
    if len({file.name for file in found}) != len(found):
        raise ValueError("a file is named twice")
    return Shipment(**{**content, "files": found, "card": card_of(content["card"])})


def _file_of(entry: Any, i: int, block_bytes: int) -> ShippedFile:
    if not isinstance(entry, dict) or entry.keys() != set(ShippedFile.__dataclass_fields__):
        raise ValueError(f"files[{i}] has other fields")
    name = entry["name"]
    # Nothing else may be named: what is named is written, and mapped.
    if not is_file_name(name) or int(name.split("-")[1].split(".")[0]) >= FILE_NUMBER_LIMIT - 1:
        raise ValueError(f"files[{i}] must be named sub-NUMBER-HEX.idx, not {str(name)[:60]!r}")
    if not is_whole(entry["tokens"], 1, 1 << 44) or not is_whole(
        entry["nbytes"], 1, _MAX_FILE_BYTES
    ):
        raise ValueError(f"files[{i}] must have tokens and nbytes from 1 on")
    if entry["corpus"] is not None and not is_name(entry["corpus"]):
        raise ValueError(f"files[{i}].corpus must be a name, or null")
    blocks = entry["blocks"]
    if not isinstance(blocks, list) or len(blocks) != -(-entry["nbytes"] // block_bytes):
        raise ValueError(f"files[{i}] must have one checksum a block")
    if not all(isinstance(each, str) and _DIGEST.fullmatch(each) for each in blocks):
        raise ValueError(f"files[{i}].blocks must be checksums of 32 hexadecimal digits")
    return ShippedFile(**{**entry, "blocks": tuple(blocks)})


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
