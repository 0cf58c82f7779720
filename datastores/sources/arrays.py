"""Token ids in .npy files."""

from collections.abc import Iterator

import numpy as np

from ..config import DatastoreError
from ..input_trie import as_token_ids
from .source import Position, ReadOptions, Record, Source, SourceError, one_line

TOKENS_PER_DOCUMENT = 1 << 20


def read_npy(source: Source, options: ReadOptions, start: Position) -> Iterator[Record]:
    """A document per row; a flat array in documents of TOKENS_PER_DOCUMENT."""
    array = _load_npy(source, options)
    if array.ndim == 1 and array.dtype != object:
        pieces = range(start.offset, array.size, TOKENS_PER_DOCUMENT)
        values = ((at, array[at : at + TOKENS_PER_DOCUMENT]) for at in pieces)
    else:
        values = ((at, array[at]) for at in range(start.offset, len(array)))
    for number, (at, value) in enumerate(values, start.number + 1):
        flat = array.ndim == 1 and array.dtype != object
        offset = at + (len(value) if flat else 1)
        where = f"tokens {at} to {offset}" if flat else f"row {number}"
        content: np.ndarray | SourceError
        try:
            content = as_token_ids(value, options.vocab_size - 1)
        except (DatastoreError, ValueError, TypeError) as error:
            content = SourceError(f"{source.path}, {where}: {one_line(error)}")
        yield Record(content, Position(offset, number), source.size * offset // len(array))


def _load_npy(source: Source, options: ReadOptions) -> np.ndarray:
    """A mapped array of whole numbers, in one or two dimensions, or a loaded object array."""
    path = source.path
    try:
        with open(path, "rb") as file:
            if file.read(6) != b"\x93NUMPY":
                raise SourceError(f"{path} is no .npy file, as numpy.save() writes it")
        try:
            array = np.load(path, mmap_mode="r")
        except ValueError as error:
            if "object" not in str(error).lower():
                raise
            if not options.allow_pickle:
                raise SourceError(
                    f"{path} holds pickled objects, and loading them runs code from the file: "
                    "pass --allow-pickle if you trust it, or save a one- or two-dimensional array "
                    "of token ids"
                ) from None
            array = np.load(path, allow_pickle=True)
    except SourceError:
        raise
    except Exception as error:  # unpickling may raise anything
        raise SourceError(f"cannot read {path}: {one_line(error)}") from None
    whole = (array.dtype == object and array.ndim == 1) or array.dtype.kind in "iu"
    if not whole or array.ndim not in (1, 2) or array.size == 0:
        raise SourceError(
            f"{path} holds {array.dtype} of shape {array.shape}; expected token ids: whole "
            "numbers in one or two dimensions, or an object array of lists of them"
        )
    return array
