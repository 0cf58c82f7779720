"""Readers of what corpora are built from: text, JSON lines, parquet, Hugging Face datasets, .npy.

find_sources() lists files, read_source() streams the documents of one. Every document comes with
the position behind it, from which a later read_source() goes on. Memory does not grow with the
files; only .npy object arrays, which are pickles, have to be loaded whole.
"""

from collections.abc import Callable, Iterator, Mapping

from .arrays import read_npy
from .finding import find_sources
from .source import BEGINNING, Position, ReadOptions, Record, Source, SourceError
from .tables import read_hf, read_parquet
from .texts import cut_point, read_jsonl, read_text

__all__ = [
    "BEGINNING",
    "Position",
    "ReadOptions",
    "Record",
    "Source",
    "SourceError",
    "cut_point",
    "find_sources",
    "read_source",
]

_READERS: Mapping[str, Callable[[Source, ReadOptions, Position], Iterator[Record]]] = {
    "text": read_text,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "hf": read_hf,
    "npy": read_npy,
}


def read_source(
    source: Source, options: ReadOptions, start: Position = BEGINNING
) -> Iterator[Record]:
    """The documents of a source from a position on.

    A document that cannot be used comes as a Record with a SourceError; the ones after it follow.
    Raises SourceError: the source as a whole cannot be read, or not any further.
    """
    return _READERS[source.format](source, options, start)
