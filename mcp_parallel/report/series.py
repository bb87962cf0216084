"""A JSONL file of any length as columns of bounded size: what a chart needs of it. No torch.

Rows are gathered into at most ``MAX_BUCKETS`` buckets of equally many rows. A column keeps the
smallest, the mean and the largest value of each bucket, so a peak of one step in a million is still
there; a file of fewer rows is kept as it is. Memory and output do not grow with the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

MAX_BUCKETS = 1500
"""More than a chart has pixels, on most screens."""
MAX_COLUMNS = 400
"""Scalar fields of one file; what is beyond is counted and left out."""
MAX_PARTS = 256
"""Entries of a field that is a list, such as one value a layer."""
_MAX_LIST_BUCKETS = 120
_MAX_LINE_BYTES = 4 << 20
_LARGEST = 1e300
"""Values beyond are no measurements, and overflow in a chart's arithmetic."""


@dataclass(slots=True)
class Column:
    """One scalar field: of the buckets that have it, in order."""

    at: list[int] = field(default_factory=list)
    """Indices of buckets."""
    low: list[float] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    count: list[int] = field(default_factory=list)
    """Rows with a finite value."""
    not_finite: list[int] = field(default_factory=list)
    """Indices of buckets with a value that was null, NaN or infinite."""
    last: float | None = None
    """The newest finite value."""


@dataclass(slots=True)
class ListColumn:
    """One field that is a list, or a table of names: means over each bucket that has it."""

    labels: list[str]
    at: list[int] = field(default_factory=list)
    rows: list[list[float | None]] = field(default_factory=list)


@dataclass(slots=True)
class Series:
    """A file: three x axes and the columns on them."""

    step: list[int] = field(default_factory=list)
    """The last step of each bucket."""
    tokens: list[float | None] = field(default_factory=list)
    """Trained on until then; None until the first row that says so."""
    time_s: list[float | None] = field(default_factory=list)
    """Time in steps until then, the sum of ``step_time_s``; None where no row has it."""
    columns: dict[str, Column] = field(default_factory=dict)
    lists: dict[str, ListColumn] = field(default_factory=dict)
    num_rows: int = 0
    rows_a_bucket: int = 1
    unreadable: int = 0
    """Lines that are no object with a ``step``."""
    is_torn: bool = False
    """The last line was cut short, as a killed or running process leaves it."""
    repeated: int = 0
    """Rows dropped because a later one has their step."""
    left_out: int = 0
    """Fields beyond ``MAX_COLUMNS``."""


def read_series(path: Path) -> Series:
    """The columns of ``path``; an empty series where the file is missing or empty.

    Steps are expected to rise. Where they fall back, as after a resumption, later rows win.

    Raises:
        OSError: the file is there and cannot be read.

    Cost: reads the file twice; about 6 microseconds a row of ten fields.
    """
    if not path.exists():
        return Series()
    with path.open("rb") as file:
        num_lines = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b"")) + 1
        file.seek(0)
        reader = _Reader(-(-num_lines // MAX_BUCKETS))
        for line in _lines(file):
            reader.take(line)
        return reader.close()


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines; of one without an end, which no writer of metrics makes, only the start."""
    while line := file.readline(_MAX_LINE_BYTES):
        yield line
        while len(line) == _MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = file.readline(_MAX_LINE_BYTES)


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The object that ``line`` holds, None when it holds none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


class _Reader:
    def __init__(self, rows_a_bucket: int) -> None:
        self.series = Series(rows_a_bucket=rows_a_bucket)
        self.rows: list[dict[str, Any]] = []
        self.last_step, self.time_s = -1, 0.0
        self.has_time = False
        self.time_at: dict[int, float] = {}

    def take(self, line: bytes) -> None:
        row = parse_row(line)
        step = None if row is None else row.get("step")
        if row is None or type(step) is not int or not 0 <= step < 1 << 53:
            if line.strip():
                self.series.unreadable += 1
                self.series.is_torn = not line.endswith(b"\n")
            return
        if step <= self.last_step:
            self._forget_from(step)
        self._add_time(row, step)
        self.rows.append(row)
        self.last_step = step
        if len(self.rows) == self.series.rows_a_bucket:
            self._flush()

    def close(self) -> Series:
        self._flush()
        if self.series.is_torn:  # not a fault of the file: it is being written, or was cut short
            self.series.unreadable -= 1
        if not self.has_time:
            self.series.time_s = [None] * len(self.series.step)
        return self.series

    def _add_time(self, row: dict[str, Any], step: int) -> None:
        each: Any = row.get("step_time_s")
        if type(each) in (int, float) and 0 <= each < _LARGEST:
            self.has_time = True
            self.time_s += each * (step - max(self.last_step, 0))

    def _forget_from(self, step: int) -> None:
        """Drop what was gathered of ``step`` and later ones."""
        series = self.series
        kept = [row for row in self.rows if row["step"] < step]
        series.repeated += len(self.rows) - len(kept)
        self.rows = kept
        while series.step and series.step[-1] >= step:
            series.step.pop()
            series.tokens.pop()
            series.time_s.pop()
            series.repeated += series.rows_a_bucket
            series.num_rows -= series.rows_a_bucket
        for column in series.columns.values():
            _cut(column, len(series.step))
        for name in series.lists:
            keep = sum(at < len(series.step) for at in series.lists[name].at)
            del series.lists[name].at[keep:], series.lists[name].rows[keep:]
        self.last_step = kept[-1]["step"] if kept else (series.step[-1] if series.step else -1)
        self.time_s = (series.time_s[-1] if series.time_s else None) or 0.0

    def _flush(self) -> None:
        """The gathered rows become a bucket."""
        if not self.rows:
            return
        series, bucket = self.series, len(self.series.step)
        series.step.append(self.last_step)
        series.num_rows += len(self.rows)
        series.time_s.append(self.time_s)
        counts = [v for v in (row.get("tokens") for row in self.rows) if _is_finite(v)]
        before = series.tokens[-1] if series.tokens else None
        series.tokens.append(counts[-1] if counts else before)
        for name in dict.fromkeys(name for row in self.rows for name in row):
            if name not in ("step", "tokens"):
                values = [row[name] for row in self.rows if name in row]
                self._add(name, bucket, values)
        self.rows = []

    def _add(self, name: str, bucket: int, values: list[Any]) -> None:
        kind = next((type(value) for value in values if value is not None), None)
        if kind in (int, float, bool, None):
            self._add_scalars(name, bucket, values)
        elif kind is list:
            size = min(MAX_PARTS, max(len(v) for v in values if type(v) is list))
            self._add_lists(name, bucket, values, [str(i) for i in range(size)])
        elif kind is dict:
            tables = [value for value in values if type(value) is dict]
            labels = list(dict.fromkeys(key for table in tables for key in table))[:MAX_PARTS]
            rows = [[table.get(label) for label in labels] for table in tables]
            self._add_lists(name, bucket, rows, labels)

    def _add_scalars(self, name: str, bucket: int, values: list[Any]) -> None:
        columns = self.series.columns
        finite = [value for value in values if _is_finite(value)]
        if name not in columns:
            if len(columns) == MAX_COLUMNS:
                self.series.left_out += 1
                return
            columns[name] = Column()
        column = columns[name]
        if len(finite) < len(values):
            column.not_finite.append(bucket)
        if finite:
            column.at.append(bucket)
            column.low.append(min(finite))
            column.mean.append(sum(finite) / len(finite))
            column.high.append(max(finite))
            column.count.append(len(finite))
            column.last = finite[-1]

    def _add_lists(self, name: str, bucket: int, values: list[Any], labels: Sequence[str]) -> None:
        """Mean by index; a list whose length changes keeps the longest."""
        lists = self.series.lists
        if name not in lists and len(lists) == MAX_COLUMNS:
            self.series.left_out += 1
            return
        found: dict[str, list[float]] = {label: [] for label in labels}
        for value in values:
            if type(value) is list:
                for label, number in zip(labels, value, strict=False):
                    if _is_finite(number):
                        found[label].append(number)
        if not any(found.values()):  # words, or lists of lists
            return
        column = lists.setdefault(name, ListColumn([]))
        column.labels += [label for label in labels if label not in column.labels]
        del column.labels[MAX_PARTS:]
        row = [found.get(label) for label in column.labels]
        column.at.append(bucket)
        column.rows.append([sum(one) / len(one) if one else None for one in row])


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float, bool) and -_LARGEST < value < _LARGEST


def _cut(column: Column, num_buckets: int) -> None:
    """Forget the buckets from ``num_buckets`` on."""
    keep = sum(at < num_buckets for at in column.at)
    if keep < len(column.at):
        for values in (column.at, column.low, column.mean, column.high, column.count):
            del values[keep:]
        column.last = column.mean[-1] if column.mean else None
    column.not_finite = [at for at in column.not_finite if at < num_buckets]


def coarsened(series: Series, num_buckets: int) -> Series:
    """``series`` in ``num_buckets`` buckets at most; the same object where it has no more.

    Neighbours are merged: the smallest, the largest and the mean over rows stay exact.
    """
    size = len(series.step)
    by = -(-size // max(1, num_buckets))
    if by <= 1:
        return series
    ends = [min(first + by, size) - 1 for first in range(0, size, by)]
    return Series(
        step=[series.step[end] for end in ends],
        tokens=[series.tokens[end] for end in ends],
        time_s=[series.time_s[end] for end in ends],
        columns={name: _merged(column, by) for name, column in series.columns.items()},
        lists={name: _newest(column, by) for name, column in series.lists.items()},
        num_rows=series.num_rows,
        rows_a_bucket=series.rows_a_bucket * by,
        unreadable=series.unreadable,
        is_torn=series.is_torn,
        repeated=series.repeated,
        left_out=series.left_out,
    )


def _merged(column: Column, by: int) -> Column:
    merged = Column(last=column.last)
    merged.not_finite = list(dict.fromkeys(at // by for at in column.not_finite))
    for at, low, mean, high, count in zip(
        column.at, column.low, column.mean, column.high, column.count, strict=True
    ):
        if merged.at and merged.at[-1] == at // by:
            total = merged.count[-1] + count
            merged.mean[-1] += (mean - merged.mean[-1]) * count / total
            merged.low[-1] = min(merged.low[-1], low)
            merged.high[-1] = max(merged.high[-1], high)
            merged.count[-1] = total
        else:
            merged.at.append(at // by)
            merged.low.append(low)
            merged.mean.append(mean)
            merged.high.append(high)
            merged.count.append(count)
    return merged


def _newest(column: ListColumn, by: int) -> ListColumn:
    """The newest row of each merged bucket."""
    rows = {at // by: row for at, row in zip(column.at, column.rows, strict=True)}
    return ListColumn(column.labels, list(rows), list(rows.values()))


def thinned(column: ListColumn, num_rows: int = _MAX_LIST_BUCKETS) -> ListColumn:
    """``column`` with ``num_rows`` rows at most, evenly spread, the newest among them."""
    size = len(column.rows)
    if size <= num_rows:
        return column
    chosen = [(size - 1) * i // (num_rows - 1) for i in range(num_rows)]
    return ListColumn(
        column.labels, [column.at[i] for i in chosen], [column.rows[i] for i in chosen]
    )
