"""Runs as the one object that the page reads: of bounded size, and valid JSON. No torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from mcp_parallel.report.facts import facts_of
from mcp_parallel.report.fields import GROUPS, shown_fields
from mcp_parallel.report.runs import Run
from mcp_parallel.report.series import Column, ListColumn, Series, coarsened, thinned
from mcp_parallel.report.summary import measured_bytes, summarize_run, typical_by_index

FORMAT_VERSION = 1
# A number takes some nine bytes: together below 4 MB.
_MAX_NUMBERS = 320_000
_MAX_LIST_NUMBERS = 100_000
_MAX_VERDICTS = 1000
_MAX_TEXT = 600


def build_document(runs: Sequence[Run]) -> dict[str, Any]:
    """Everything that the page shows, as plain values without NaN or infinity.

    Args:
        runs: at least one, in the order of their colours.

    Returns:
        ``runs``, each with its ``summary``, ``facts``, ``config``, ``verdicts``, ``notes``,
        ``axes`` (``step``, ``tokens``, ``time``, ``rows_a_point``; the first of metrics.jsonl), on
        them ``columns`` and ``lists``; ``fields``: how each is shown; ``groups``; ``made_s``.
    """
    built = [_run(run, len(runs)) for run in runs]
    for one, name in zip(built, _distinct_names(runs), strict=True):
        one["name"] = name
    names = [name for one in built for name in (*one["columns"], *one["lists"])]
    return {
        "version": FORMAT_VERSION,
        "made_s": round(time.time()),
        "groups": GROUPS,
        "fields": shown_fields(names),
        "runs": built,
    }


def _distinct_names(runs: Sequence[Run]) -> list[str]:
    names = [run.name for run in runs]
    return [run.path if names.count(run.name) > 1 else run.name for run in runs]


def _run(run: Run, num_runs: int) -> dict[str, Any]:
    notes = list(run.notes)
    facts = facts_of(run.config, notes) if run.config else None
    summary = summarize_run(run, facts)
    bubbles = typical_by_index(run.metrics.lists.get("bubble_by_rank"), len(run.metrics.step))
    found: dict[str, Any] = {
        "path": run.path,
        "updated_s": run.updated_s,
        "summary": {name: _rounded(value) for name, value in summary.items()},
        "facts": facts,
        "config": _plain(run.tables),
        "verdicts": _plain(run.verdicts[-max(5, _MAX_VERDICTS // num_runs) :]),
        "notes": notes,
        "axes": [],
        "columns": {},
        "lists": {},
        "bubble_by_rank": [_rounded(value) for value in bubbles],
        "memory_by_pp": measured_bytes(run) if facts else [],
    }
    files = {"": run.metrics, **{f"{name}/": series for name, series in run.others.items()}}
    share = num_runs * len(files)
    for prefix, series in files.items():
        _add_series(found, prefix, series, share)
    return found


def _add_series(found: dict[str, Any], prefix: str, series: Series, share: int) -> None:
    """The axis and the columns of one file, in as many points as its share of the page allows."""
    a_bucket = 3 + sum(4 * len(c.at) for c in series.columns.values()) / max(1, len(series.step))
    short = coarsened(series, max(2, int(_MAX_NUMBERS / share / a_bucket)))
    axis = len(found["axes"])
    found["axes"].append(
        {
            "rows_a_point": short.rows_a_bucket,
            "step": short.step,
            "tokens": [_rounded(value, 12) for value in short.tokens],
            "time": [_rounded(value) for value in short.time_s],
        }
    )
    for name, column in short.columns.items():
        if column.at:
            size = len(short.step)
            found["columns"][f"{prefix}{name}"] = {"axis": axis, **_column(column, size)}
    numbers = sum(len(one.labels) for one in short.lists.values())
    rows = max(2, min(120, _MAX_LIST_NUMBERS // share // max(1, numbers)))
    for name, column in short.lists.items():
        found["lists"][f"{prefix}{name}"] = {"axis": axis, **_list(thinned(column, rows))}


def _column(column: Column, size: int) -> dict[str, Any]:
    """``mean``; ``at`` where buckets lack it, ``low`` and ``high`` where rows share a point."""
    values: dict[str, Any] = {"mean": [_rounded(value) for value in column.mean]}
    if len(column.at) < size:
        values["at"] = column.at
    if any(count > 1 for count in column.count):
        values["low"] = [_rounded(value) for value in column.low]
        values["high"] = [_rounded(value) for value in column.high]
    if column.not_finite:
        values["bad"] = column.not_finite
    return values


def _list(column: ListColumn) -> dict[str, Any]:
    return {
        "labels": [_cut(label) for label in column.labels],
        "at": column.at,
        "rows": [[_rounded(value, 4) for value in row] for row in column.rows],
    }


def _rounded(value: Any, digits: int = 6) -> Any:
    """A float at ``digits`` digits, as an integer where it is one; anything else as it is."""
    if not isinstance(value, float):
        return int(value) if isinstance(value, bool) else value
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _plain(value: Any) -> Any:
    """What JSON can hold: a number that is not finite as a word, long texts cut."""
    if isinstance(value, Mapping):
        return {_cut(str(key)): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not -1e308 < value < 1e308:
        return str(value)
    if isinstance(value, int) and not -(1 << 53) < value < 1 << 53:
        return _cut(str(value)) if value.bit_length() < 2000 else "an integer of many digits"
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return _cut(str(value))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
