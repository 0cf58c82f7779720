"""Parquet files and Hugging Face datasets on disk."""

from collections.abc import Iterator, Sequence
from typing import Any

from .source import Position, ReadOptions, Record, Source, SourceError, one_line
from .values import no_field, row_content

_ROW_BATCH_BYTES = 1 << 23
_ROW_BATCH_MOST = 8192


def read_parquet(source: Source, options: ReadOptions, start: Position) -> Iterator[Record]:
    """A document per row, in batches of about _ROW_BATCH_BYTES."""
    import pyarrow
    import pyarrow.parquet

    try:
        # Pages are decoded as they are needed, not whole row groups ahead.
        file = pyarrow.parquet.ParquetFile(source.path, memory_map=True, pre_buffer=False)
        columns = _columns(source, options, file.schema_arrow.names)
        rows = file.metadata.num_rows
        step = _rows_per_batch(source.size, rows)
        number = 0
        for group in range(file.num_row_groups):
            if number + file.metadata.row_group(group).num_rows <= start.number:
                number += file.metadata.row_group(group).num_rows
                continue
            for batch in file.iter_batches(step, [group], columns, use_threads=False):
                new = batch.slice(min(batch.num_rows, max(0, start.number - number)))
                number += batch.num_rows
                yield from _table_records(source, options, new, number - new.num_rows, rows)
    except (pyarrow.ArrowException, OSError) as error:
        raise SourceError(f"cannot read parquet file {source.path}: {one_line(error)}") from None


def read_hf(source: Source, options: ReadOptions, start: Position) -> Iterator[Record]:
    """A document per row of what datasets' save_to_disk() wrote, in the dataset's order."""
    import datasets
    import pyarrow

    try:
        dataset = datasets.Dataset.load_from_disk(source.path)
        columns = _columns(source, options, dataset.column_names)
        table = dataset.select_columns(columns).with_format("arrow")
        rows = len(dataset)
        step = _rows_per_batch(source.size, rows)
        for number in range(start.number, rows, step):
            batch = table[number : number + step]
            yield from _table_records(source, options, batch, number, rows)
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(f"cannot read dataset {source.path}: {one_line(error)}") from None


def _columns(source: Source, options: ReadOptions, known: Sequence[str]) -> list[str]:
    """The columns that hold the fields; SourceError if one is not there."""
    found: dict[str, None] = {}
    for field in options.fields:
        column = field if field in known else field.split(".")[0]
        if column not in known:
            raise SourceError(f"{source.path}: {no_field('column', field, known)}")
        found[column] = None
    return list(found)


def _rows_per_batch(size: int, rows: int) -> int:
    return max(1, min(_ROW_BATCH_MOST, _ROW_BATCH_BYTES * rows // max(1, size)))


def _table_records(
    source: Source, options: ReadOptions, table: Any, number: int, rows: int
) -> Iterator[Record]:
    for row in table.to_pylist():
        number += 1
        content = row_content(row, f"{source.path}, row {number}", options)
        yield Record(content, Position(number, number), source.size * number // rows)
