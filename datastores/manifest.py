"""The manifest: which files of a datastore's folder count, replaced in one step.

MANIFEST is JSON, {"crc32": of the canonical dump of the rest, "manifest": {...}}, with the fields
of Manifest. Files that it does not name are leftovers of a kill and are removed; logs count from
first_log on.
"""

import json
import os
import zlib
from dataclasses import asdict, dataclass, field
from typing import Any

from .config import DatastoreError
from .files import replace_file

NAME = "MANIFEST"
VERSION = 2
_FORMAT = "sglang-ext datastore"


@dataclass(frozen=True)
class FileEntry:
    """One sub-index file."""

    name: str
    tokens: int
    corpus: str | None = None
    """The corpus that it is a part of; None: served outputs, a segment per namespace."""


@dataclass(frozen=True)
class Manifest:
    """The state of a folder."""

    vocab_size: int
    tokenizer_fingerprint: str
    files: tuple[FileEntry, ...] = ()
    """Oldest first."""
    next_file: int = 1
    next_number: int = 0
    """Documents that come get this number or more."""
    first_log: int = 1
    building: dict[str, Any] = field(default_factory=dict)
    """By unfinished corpus, which is not served: what its builder noted to go on from."""


def read_manifest(folder: str) -> Manifest | None:
    """The folder's manifest; None if there is none. DatastoreError if it is damaged."""
    path = os.path.join(folder, NAME)
    try:
        with open(path, "rb") as file:
            text = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DatastoreError(f"cannot read {path}: {error.strerror or error}") from None
    try:
        stored = json.loads(text)
        content, checksum = stored["manifest"], stored["crc32"]
        intact = _checksum(content) == checksum and content.pop("format") == _FORMAT
    except (ValueError, KeyError, TypeError):
        intact = False
    if not intact:
        raise DatastoreError(
            f"{path} is damaged: its checksum is wrong; restore it from a backup, or move the "
            "folder away and build it again"
        )
    version = content.pop("version")
    if version != VERSION:
        raise DatastoreError(f"{path} has format version {version}; this program reads {VERSION}")
    content["files"] = tuple(FileEntry(**entry) for entry in content["files"])
    return Manifest(**content)


def manifest_stamp(folder: str) -> tuple[int, int, int] | None:
    """What is another one after each write_manifest(); None if there is no manifest."""
    try:
        found = os.stat(os.path.join(folder, NAME))
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def write_manifest(folder: str, manifest: Manifest) -> None:
    """Replaces the folder's manifest. DatastoreError if it cannot: the old one is as it was."""
    content = {"format": _FORMAT, "version": VERSION, **asdict(manifest)}
    content = json.loads(json.dumps(content))  # tuples become lists, as a reader will see them
    text = json.dumps({"crc32": _checksum(content), "manifest": content}, indent=1)
    with replace_file(os.path.join(folder, NAME)) as file:
        file.write(text.encode())


def check_same_tokenizer(
    where: str, manifest: Manifest, vocab_size: int | None, tokenizer_fingerprint: str | None
) -> None:
    """DatastoreError unless the folder was built for this vocabulary and tokenizer."""
    if vocab_size is not None and manifest.vocab_size != vocab_size:
        raise DatastoreError(
            f"datastore {where} was built for a vocabulary of {manifest.vocab_size} tokens, not "
            f"{vocab_size}: build it again with this model's tokenizer"
        )
    stored = manifest.tokenizer_fingerprint
    if tokenizer_fingerprint and stored and stored != tokenizer_fingerprint:
        raise DatastoreError(
            f"datastore {where} was built with tokenizer {stored!r}, not "
            f"{tokenizer_fingerprint!r}: build it again with this model's tokenizer"
        )


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
