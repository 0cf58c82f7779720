"""What all readers share: sources, positions, records and options."""

import os
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..config import DatastoreError

FORMATS = ("text", "jsonl", "hf", "parquet", "npy")


class SourceError(DatastoreError):
    """A source cannot be read; the message names the file, the place, and what was expected."""


class Position(NamedTuple):
    """A place between two documents of a source."""

    offset: int
    """Bytes (text and JSON lines; decompressed), tokens (flat .npy), else rows before it."""
    number: int
    """Lines, rows or documents before it."""


BEGINNING = Position(0, 0)


class Record(NamedTuple):
    """One document of a source."""

    content: str | np.ndarray | SourceError
    """A document's text, its token ids (int32[n]), or what is wrong with it."""
    position: Position
    """Behind it."""
    done: int
    """Bytes of the source that are read, of Source.size."""


@dataclass(frozen=True)
class Source:
    """One file, or one Hugging Face dataset (one split of it)."""

    path: str
    format: str
    """One of FORMATS."""
    size: int
    """Bytes on disk."""
    mtime_ns: int

    @property
    def identity(self) -> str:
        """8 characters that change with the path, size, time of change and format."""
        text = f"{os.path.abspath(self.path)}|{self.size}|{self.mtime_ns}|{self.format}"
        return f"{zlib.crc32(text.encode(errors='surrogateescape')):08x}"


@dataclass(frozen=True)
class ReadOptions:
    """How documents are taken from sources."""

    vocab_size: int
    """Token ids are 0..vocab_size - 1."""
    fields: tuple[str, ...] = ("text",)
    """Fields of JSON lines, columns of tables; a.b is b within a. More than one are joined with
    line breaks. A value is a text, chat messages ({"role", "content"}), or token ids."""
    max_line_bytes: int = 32 << 20
    """A longer JSON line is an error."""
    allow_pickle: bool = False
    """Whether .npy object arrays are loaded. Unpickling runs code of the file's author."""


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
