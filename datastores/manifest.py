"""The manifest: which files of a datastore's folder count, replaced in one step.

MANIFEST is JSON, {"crc32": of the canonical dump of the rest, "manifest": {...}}, with the fields
of Manifest. Files that it does not name are leftovers of a kill and are removed; logs count from
first_log on, those of a member of a fleet from its number in `members` on. Version 2 is what a
folder has that no fleet has used: it has no `members`.
"""

import json
import os
import re
import zlib
from dataclasses import asdict, dataclass, field
from typing import Any

from .config import DatastoreError
from .files import open_file, replace_file
from .log_names import FILE_NUMBER_LIMIT, LogName, is_member
from .segment import MAX_NAME_BYTES, NUMBER_LIMIT

NAME = "MANIFEST"
VERSION = 3
_ALONE_VERSION = 2
_FORMAT = "sglang-ext datastore"
_MAX_BYTES = 1 << 26
MAX_VOCAB_SIZE = 1 << 30
_MAX_TOKENS = 1 << 44
# Nothing else may be named: what is named is mapped, and removed one day.
_FILE_NAME = re.compile(r"sub-[0-9]{8,16}(-[0-9a-f]{8})?\.idx", re.ASCII)


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
    members: dict[str, int] | None = None
    """By member of a fleet: its first log that counts (1 where it is not named). None: no fleet has
    used the folder, and whoever wrote this does not look for members' logs."""

    def counts(self, log: LogName) -> bool:
        """Whether a log is not in sub-index files yet."""
        if log.member is None:
            return log.number >= self.first_log
        return log.number >= (self.members or {}).get(log.member, 1)


def read_manifest(folder: str) -> Manifest | None:
    """The folder's manifest; None if there is none. DatastoreError if it is damaged."""
    path = os.path.join(folder, NAME)
    try:
        with open_file(path) as file:
            text = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DatastoreError(f"cannot read {path}: {error.strerror or error}") from None
    if len(text) > _MAX_BYTES:
        raise DatastoreError(f"{path} has more than {_MAX_BYTES} bytes: restore it from a backup")
    try:
        stored = json.loads(text)
        content, checksum = stored["manifest"], stored["crc32"]
        intact = _checksum(content) == checksum and content.pop("format") == _FORMAT
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise DatastoreError(
            f"{path} is damaged: its checksum is wrong; restore it from a backup, or move the "
            "folder away and build it again"
        )
    version = content.pop("version", None)
    if version not in (_ALONE_VERSION, VERSION):
        raise DatastoreError(
            f"{path} has format version {version}; this program reads {_ALONE_VERSION} and "
            f"{VERSION}"
        )
    if version == _ALONE_VERSION:
        content.setdefault("members", None)
    problem = _problem(content)
    if problem is not None:
        raise DatastoreError(
            f"{path} is not one that a datastore writes: {problem}; restore it from a backup, or "
            "move the folder away and build it again"
        )
    content["files"] = tuple(FileEntry(**entry) for entry in content["files"])
    return Manifest(**content)


def is_file_name(value: object) -> bool:
    """Whether it can be the name of a sub-index file: nothing that leads out of a folder."""
    return isinstance(value, str) and _FILE_NAME.fullmatch(value) is not None


def is_name(value: object) -> bool:
    """Whether it can be the name of a namespace or a corpus in a file."""
    try:
        return isinstance(value, str) and 0 < len(value.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:
        return False


def is_whole(value: object, low: int, high: int) -> bool:
    """Whether it is an int of low..high, and no bool."""
    return type(value) is int and low <= value <= high


def is_text(value: object) -> bool:
    """Whether it is a text that UTF-8 can hold."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _problem(content: dict[str, Any]) -> str | None:
    """The first field that is not as write_manifest() makes it; None: all are."""
    expected = {name for name in Manifest.__dataclass_fields__}
    if content.keys() != expected:
        odd = sorted(content.keys() ^ expected)[0]
        return f"field {odd[:40]!r} is {'unknown' if odd in content else 'missing'}"
    for name, low, high in (
        ("vocab_size", 1, MAX_VOCAB_SIZE),
        ("next_file", 1, FILE_NUMBER_LIMIT),
        ("next_number", 0, NUMBER_LIMIT),
        ("first_log", 1, FILE_NUMBER_LIMIT),
    ):
        if not is_whole(content[name], low, high):
            return f"{name} must be a whole number of {low} to {high}"
    if not is_text(content["tokenizer_fingerprint"]):
        return "tokenizer_fingerprint must be a text"
    building = content["building"]
    if not isinstance(building, dict) or not all(
        is_name(name) and (noted is None or isinstance(noted, dict))
        for name, noted in building.items()
    ):
        return "building must be an object of objects by corpus"
    members = content["members"]
    if members is not None and not (
        isinstance(members, dict)
        and all(
            is_member(name) and is_whole(first, 1, FILE_NUMBER_LIMIT)
            for name, first in members.items()
        )
    ):
        return "members must be an object of whole numbers by member"
    files = content["files"]
    if not isinstance(files, list):
        return "files must be a list"
    for i, entry in enumerate(files):
        if not isinstance(entry, dict) or entry.keys() != {"name", "tokens", "corpus"}:
            return f"files[{i}] must have a name, tokens and a corpus"
        if not is_file_name(entry["name"]):
            return f"files[{i}] must be named sub-NUMBER-HEX.idx, not {str(entry['name'])[:60]!r}"
        if not is_whole(entry["tokens"], 1, _MAX_TOKENS):
            return f"files[{i}].tokens must be a whole number from 1 on"
        if entry["corpus"] is not None and not is_name(entry["corpus"]):
            return f"files[{i}].corpus must be a name of up to {MAX_NAME_BYTES} bytes, or null"
    if len({entry["name"] for entry in files}) != len(files):
        return "a file is named twice"
    return None


def manifest_stamp(folder: str) -> tuple[int, int, int] | None:
    """What is another one after each write_manifest(); None if there is no manifest."""
    try:
        found = os.lstat(os.path.join(folder, NAME))
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def write_manifest(folder: str, manifest: Manifest) -> None:
    """Replaces the folder's manifest. DatastoreError if it cannot: the old one is as it was."""
    alone = manifest.members is None
    content = {
        "format": _FORMAT,
        "version": _ALONE_VERSION if alone else VERSION,
        **asdict(manifest),
    }
    if alone:
        del content["members"]
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
