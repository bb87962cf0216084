"""A run folder as plain values, whatever its state and the version that wrote it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mcp_parallel.config import TABLES, Config
from mcp_parallel.config_schema import table_items
from mcp_parallel.config_text import read_config_file
from mcp_parallel.division import MEASURED
from mcp_parallel.errors import ConfigError, shown_path
from mcp_parallel.monitor.run_folder import RunFolder
from mcp_parallel.report.series import Series, parse_row, read_series

BALANCE_FILE = "balance.json"
MAX_VERDICTS = 200
"""Of each run; the newest are kept."""


@dataclass(slots=True)
class Run:
    """What is known of one run."""

    name: str
    path: str
    tables: dict[str, Any]
    """``config.yaml`` as it stands; empty without one."""
    config: Config | None
    """The keys that this version knows; None where they are no whole configuration."""
    metrics: Series
    others: dict[str, Series] = field(default_factory=dict)
    """Further JSONL files with steps, by their name without the ending."""
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    """Objects of ``verdicts.jsonl``, oldest first."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know about the data: torn lines, unknown keys, nothing recorded."""
    updated_s: float | None = None
    """When the newest metrics were written, seconds since 1970."""


def read_run(path: Path) -> Run:
    """The run in the folder ``path``.

    Raises:
        ConfigError: there is no run in it, or its files cannot be read.
    """
    folder = RunFolder(path)
    if not path.is_dir() or not folder.holds_run():
        kind = "a folder without a run" if path.is_dir() else "no folder"
        problem = (
            f"report: RUN must be the folder of a run (config.yaml, metrics.jsonl), got {kind} at "
            f"{shown_path(path)}; name one that train wrote, such as runs/tiny-1"
        )
        raise ConfigError([problem])
    try:
        return _read(folder)
    except OSError as error:
        name = shown_path(error.filename or path)
        raise ConfigError(
            [f"report: RUN must be readable, got {error.strerror} for {name}; fix that"]
        ) from error


def _read(folder: RunFolder) -> Run:
    path, notes = folder.path, []
    tables = _tables(folder.config_file, notes)
    metrics = read_series(folder.metrics_file)
    run = Run(
        name=path.resolve().name,
        path=str(path),
        tables=tables,
        config=_config(tables, path / BALANCE_FILE, notes) if tables else None,
        metrics=metrics,
        verdicts=_verdicts(folder.verdicts_file, notes),
        notes=notes,
        updated_s=folder.metrics_file.stat().st_mtime if folder.metrics_file.exists() else None,
    )
    for file in sorted(path.glob("*.jsonl")):
        if file not in (folder.metrics_file, folder.verdicts_file) and file.is_file():
            series = read_series(file)
            if series.step:
                run.others[file.stem] = series
    _note_gaps(metrics, notes)
    return run


def _tables(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.exists():
        notes.append("config.yaml is missing: no layout, memory or pipeline can be shown")
        return {}
    try:
        return read_config_file(path)
    except ConfigError as error:
        notes.append(f"config.yaml cannot be read: {error.problems[0]}")
        return {}


def _config(tables: Mapping[str, Any], balance: Path, notes: list[str]) -> Config | None:
    """The configuration as far as this version knows its keys; what it does not know is noted.

    Words for a split or shares that the run measured are the numbers that it found.
    """
    known: dict[str, Any] = {}
    unknown: list[str] = []
    for table, values in tables.items():
        kind = TABLES.get(table)
        if kind is None or not isinstance(values, Mapping):
            unknown.append(str(table))
            continue
        keys = {key for key, _ in table_items(kind())}
        known[table] = {key: value for key, value in values.items() if key in keys}
        unknown += [f"{table}.{key}" for key in values if key not in keys]
    if "parallel" in known and "rank_order" not in known["parallel"]:
        # A run writes every key: this one is older than the key, and pp was outermost then.
        known["parallel"]["rank_order"] = "pp-dp-cp-tp"
    if unknown:
        notes.append(f"keys of another version, shown as they stand: {', '.join(unknown[:20])}")
    try:
        return _with_measured(Config.from_mapping(known), balance)
    except ConfigError as error:
        notes.append(f"config.yaml is of another version: {error.problems[0]}")
        return None


def _with_measured(config: Config, balance: Path) -> Config:
    record = parse_row(balance.read_bytes()) if balance.is_file() else None
    for key in ("stage_split", "dp_shares"):
        numbers = (record or {}).get(key)
        if getattr(config.parallel, key) in MEASURED and isinstance(numbers, list):
            text = ",".join(str(number) for number in numbers)
            config = replace(config, parallel=replace(config.parallel, **{key: text}))
    return config


def _verdicts(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with path.open("rb") as file:
        rows = [row for row in map(parse_row, file) if row is not None]
    if len(rows) > MAX_VERDICTS:
        notes.append(f"{len(rows)} verdicts: the newest {MAX_VERDICTS} are shown")
    return rows[-MAX_VERDICTS:]


def _note_gaps(series: Series, notes: list[str]) -> None:
    if not series.step:
        notes.append("no step was recorded yet")
    if series.is_torn:
        notes.append("the last line of metrics.jsonl is cut short and was left out")
    if series.unreadable:
        notes.append(f"{series.unreadable} lines of metrics.jsonl hold no step and were left out")
    if series.repeated:
        notes.append(f"{series.repeated} rows were written again later and were left out")
    if series.left_out:
        notes.append("more fields than can be shown: some were left out")
