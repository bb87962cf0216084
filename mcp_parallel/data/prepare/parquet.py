"""The texts of Parquet files, a row group at a time; by pyarrow."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from mcp_parallel.data import storage
from mcp_parallel.data.prepare.sources import Shard, SourceError
from mcp_parallel.errors import joined, shown

# Rows that are in memory at a time, beside the pages that they are in.
_ROWS = 256


class RowGroup(NamedTuple):
    """What can be read on its own."""

    number: int
    size: int
    """Bytes in memory, of all columns."""
    first_row: int


def row_groups(shard: Shard) -> list[RowGroup]:
    """The row groups of a file, in order. Cost: reads its footer.

    Raises:
        SourceError: it is no whole Parquet file, or has no rows.
    """
    with _opened(shard) as file:
        groups, row = [], 0
        for number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(number)
            groups.append(RowGroup(number, group.total_byte_size, row))
            row += group.num_rows
    if row == 0:
        raise SourceError(f"data: {shard.name!a} must hold some text, got no rows")
    return groups


def texts_of_group(shard: Shard, group: int, first_row: int, field: str) -> Iterator[str]:
    """The column ``field`` of a row group, row by row.

    Args:
        shard: the file.
        group: number of the row group.
        first_row: rows of the file before it, for messages.
        field: name of the column.

    Raises:
        SourceError: the file is broken, or has no such column, or a row no text in it.
    """
    row = first_row
    with _opened(shard) as file:
        _refuse_without_column(shard, file, field)
        batches = file.iter_batches(batch_size=_ROWS, row_groups=[group], columns=[field])
        for batch in batches:
            for text in batch.column(0).to_pylist():
                row += 1
                if not isinstance(text, str):
                    place = f"{shard.name} row {row}"
                    raise SourceError(
                        f"data: {place!a} must have text in {shown(field)}, got {shown(text)}; "
                        "fill it or leave the row out"
                    )
                yield text


def _refuse_without_column(shard: Shard, file: Any, field: str) -> None:
    import pyarrow.types as kinds

    schema = file.schema_arrow
    texts = [f.name for f in schema if kinds.is_string(f.type) or kinds.is_large_string(f.type)]
    if field not in schema.names:
        names = joined((shown(name) for name in texts), "and") or "no column"
        raise SourceError(
            f"data: {shard.name!a} must have a column {shown(field)}, got none; give --field, text "
            f"is in {names}"
        )


@contextmanager
def _opened(shard: Shard) -> Iterator[Any]:
    """The file, with pyarrow's errors as ours."""
    if importlib.util.find_spec("pyarrow") is None:
        raise SourceError(
            f"data: {shard.name!a} must have pyarrow installed to be read, got no such package; "
            "pip install pyarrow"
        )
    import pyarrow
    from pyarrow.parquet import ParquetFile

    with storage.opened(shard.path) as raw:
        try:
            with ParquetFile(raw, page_checksum_verification=True) as file:
                yield file
        except (SourceError, storage.StorageError):
            raise
        except (pyarrow.ArrowException, OSError, ValueError, UnicodeDecodeError) as error:
            words = shown(f"{type(error).__name__}: {error}")[1:-1]
            raise SourceError(
                f"data: {shard.name!a} must be a whole Parquet file, got {words}; write it again, "
                "or leave it out"
            ) from None
