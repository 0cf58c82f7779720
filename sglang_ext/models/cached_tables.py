"""Files that are there whole or not at all, and measured tables that are kept for the next start.

A table lies in a folder of the cache under a name made of what it was measured for: another model,
device or setting has another file. Delete the file to measure afresh.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from zipfile import BadZipFile

logger = logging.getLogger(__name__)

PARTIAL = ".partial"  # how the names of files end that are being written
# What reading a file raises that was cut off, damaged, or written by another version.
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, EOFError, BadZipFile)

Table = TypeVar("Table")


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes its name, synced, when the block ends without an error.

    Until then the file that had the name stays, and also if the block raises or the disk is full.
    (`datastores.files` has one of its own: its files are private and their names synced too.)

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class CachedTable:
    """One table of the cache.

    Args:
        folder: where tables of its kind lie.
        identity: what it holds for, as JSON can say it.
        suffix: the file's, with its dot.
        what: it is, for the log: "the cost sweep is".
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], suffix: str, what: str):
        text = json.dumps(dict(identity), sort_keys=True)
        self.path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}{suffix}"
        self._what = what

    def read(self, parse: Callable[[Path], Table | None]) -> Table | None:
        """What `parse` makes of the file; None: there is none, or none that can be used."""
        with suppress(*_UNREADABLE):
            return parse(self.path)
        return None

    def keep(self, write: Callable[[BinaryIO], object]) -> None:
        """Have `write` fill the file anew; where that fails, a warning is all that comes of it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(self.path) as file:
                write(file)
        except OSError as error:
            logger.warning("%s not kept for the next start: %s", self._what, error)
