"""Text and JSON lines, perhaps compressed with gzip."""

import contextlib
import gzip
import zlib
from collections.abc import Iterator
from typing import BinaryIO, cast

import numpy as np

from .source import Position, ReadOptions, Record, Source, SourceError
from .values import decoded, json_content

TEXT_PIECE_BYTES = 1 << 18
_SKIP_BYTES = 1 << 20
_UTF8_BOM = b"\xef\xbb\xbf"


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The file's bytes, decompressed if it ends in .gz, and the file itself."""
    try:
        with open(path, "rb") as file:
            if path.lower().endswith(".gz"):
                with gzip.open(file) as stream:
                    yield cast(BinaryIO, stream), file
            else:
                yield file, file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SourceError(f"{path} is damaged: {error}; expected a whole gzip file") from None
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror or error}") from None


def read_text(source: Source, options: ReadOptions, start: Position) -> Iterator[Record]:
    """A file in pieces of TEXT_PIECE_BYTES, cut between paragraphs or lines; each a document."""
    offset, number = start
    with _opened(source.path) as (stream, file):
        stream.seek(offset)
        rest = b""
        while data := rest + stream.read(TEXT_PIECE_BYTES - len(rest)):
            size = len(data) if len(data) < TEXT_PIECE_BYTES else cut_point(data)
            piece, rest = data[:size], data[size:]
            where = f"{source.path}, bytes {offset} to {offset + size}"
            if offset == 0:
                piece = piece.removeprefix(_UTF8_BOM)
            offset, number = offset + size, number + 1
            content = decoded(piece, where)
            if isinstance(content, str) and "\0" in content:
                content = SourceError(f"{where}: expected text, found NUL bytes: a binary file?")
            yield Record(content, Position(offset, number), file.tell())


def cut_point(data: bytes) -> int:
    """Where to cut UTF-8 text in two: behind its last paragraph, line, word or character."""
    for mark, keep in ((b"\n\n", 2), (b"\n", 1), (b" ", 0)):
        at = data.rfind(mark, len(data) // 2)
        if at > 0:
            return at + keep
    for back in range(1, min(4, len(data))):
        if data[-back] & 0xC0 != 0x80:  # the first byte of the last character
            return len(data) - back if data[-back] >= 0xC0 else len(data)
    return len(data)


def read_jsonl(source: Source, options: ReadOptions, start: Position) -> Iterator[Record]:
    """A document per line, which is a JSON object with the fields."""
    offset, number = start
    limit = options.max_line_bytes
    with _opened(source.path) as (stream, file):
        stream.seek(offset)
        while line := stream.readline(limit + 1):
            number += 1
            where = f"{source.path}, line {number}"
            content: str | np.ndarray | SourceError
            if len(line) > limit and not line.endswith(b"\n"):
                offset += _skip_line(stream)
                content = SourceError(
                    f"{where} is longer than {limit / (1 << 20):g} MB (--max-line-mb)"
                )
            else:
                text = line if offset else line.removeprefix(_UTF8_BOM)
                content = json_content(text, where, options)
            offset += len(line)
            yield Record(content, Position(offset, number), file.tell())


def _skip_line(stream: BinaryIO) -> int:
    """Reads to the end of a line; returns how many bytes."""
    skipped = 0
    while block := stream.readline(_SKIP_BYTES):
        skipped += len(block)
        if block.endswith(b"\n"):
            break
    return skipped
