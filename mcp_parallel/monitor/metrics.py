"""Metrics of a run on disk: ``metrics.jsonl``, TensorBoard events where it is there. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mcp_parallel.monitor.events import open_events
from mcp_parallel.monitor.run_folder import RunFolder

# What is no curve of its own in TensorBoard.
_NOT_CURVES = frozenset({"step", "tokens"})
_JSON = json.JSONEncoder(allow_nan=False)


class MetricsWriter:
    """Appends records of steps; a resumed run continues where its checkpoint was.

    Each record is handed to the system before ``log`` returns: a process that is killed loses none.

    Args:
        run_folder: where ``metrics.jsonl`` and ``tensorboard/`` go.
        tensorboard: also write TensorBoard events, when it is installed.
        start_step: steps done before this run; rows of later steps, which a run wrote after the
            checkpoint that this one starts from, are dropped, so that steps stay unique.
    """

    def __init__(self, run_folder: RunFolder, tensorboard: bool, start_step: int = 0) -> None:
        run_folder.create()
        self.last_kept = drop_rows_after(run_folder.metrics_file, start_step)
        """The newest record before this run, or None."""
        self._file = run_folder.metrics_file.open("ab")
        self._events = (
            open_events(run_folder.tensorboard_dir, start_step + 1) if tensorboard else None
        )

    def log(self, record: Mapping[str, Any]) -> None:
        """Write one record: ``step``, numbers, and lists and objects of them (see ``fields.py``).

        A number that is not finite becomes null.
        """
        try:
            line = _JSON.encode(record)
        except ValueError:  # a number that is not finite
            record = {name: _plain(value) for name, value in record.items()}
            line = _JSON.encode(record)
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        if self._events is not None:
            self._events.scalars(record["step"], _points(record))

    def note(self, step: int, text: str) -> None:
        """A line of text beside the curves of TensorBoard."""
        if self._events is not None:
            self._events.text(step, "verdicts", text)

    def close(self) -> None:
        """Nothing follows."""
        self._file.close()
        if self._events is not None:
            self._events.close()


def _points(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if name not in _NOT_CURVES:
            yield from _curves(name, value)


def _curves(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """The curves that a value is a point of."""
    if isinstance(value, (int, float)):
        yield f"train/{name}", value
    elif isinstance(value, Mapping):
        yield from (
            (f"{name}/{key}", number) for key, number in value.items() if _is_number(number)
        )
    elif isinstance(value, list):
        # One curve a rank would be thousands on a cluster.
        numbers = sorted(number for number in value if _is_number(number))
        if numbers:
            yield f"{name}/min", numbers[0]
            yield f"{name}/median", numbers[len(numbers) // 2]
            yield f"{name}/max", numbers[-1]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def drop_rows_after(path: Path, step: int) -> dict[str, Any] | None:
    """Keep the rows of ``path`` up to ``step``, without a last line cut short; the last kept."""
    if not path.exists():
        return None
    kept: list[str] = []
    last: dict[str, Any] | None = None
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int) and row["step"] <= step:
                kept.append(line if line.endswith("\n") else line + "\n")
                last = row
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)
    return last
