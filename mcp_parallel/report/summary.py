"""The figures that stand for a whole run, on the page and in the terminal. No torch."""

from __future__ import annotations

import statistics
from typing import Any

from mcp_parallel.layout import Layout
from mcp_parallel.report.runs import Run
from mcp_parallel.report.series import Column, ListColumn


def summarize_run(run: Run, facts: dict[str, Any] | None) -> dict[str, Any]:
    """One value a figure, None where it was not recorded.

    Args:
        run: as read.
        facts: of ``facts_of``.

    Returns:
        ``steps`` and ``total_steps``, ``state`` (``done``, ``unfinished``, ``diverged``,
        ``empty``), ``loss`` (the last), ``val_loss`` (the best), ``tokens``, ``time_s``,
        ``layout`` in words, ``parameters``; medians over the second half of the run of
        ``tokens_per_s``, ``step_time_s``, ``mfu``, ``communication_share`` and ``bubble``;
        ``bubble_theory``; ``memory_bytes`` (largest of a rank, newest sample),
        ``memory_predicted_bytes``, ``verdicts``.
    """
    series = run.metrics
    columns, lists = series.columns, series.lists
    config = run.config
    total = config.train.steps if config else None
    pipeline = facts["pipeline"] if facts else None
    memory = facts["memory"] if facts else None
    best_validation = columns.get("val_loss")
    loss = columns.get("loss")
    return {
        "state": _state(run, total),
        "steps": series.step[-1] if series.step else 0,
        "total_steps": total,
        "loss": loss.last if loss else None,
        "val_loss": min(best_validation.low, default=None) if best_validation else None,
        "tokens": series.tokens[-1] if series.tokens else None,
        "time_s": series.time_s[-1] if series.time_s else None,
        "layout": layout_words(Layout.from_config(config.parallel)) if config else None,
        "parameters": facts["parameters"] if facts else None,
        **{
            name: typical(columns.get(name), len(series.step))
            for name in ("tokens_per_s", "step_time_s", "mfu", "communication_share", "bubble")
        },
        "bubble_theory": statistics.fmean(pipeline["bubble"]) if pipeline else None,
        "memory_bytes": _largest(lists.get("memory_bytes_by_rank")),
        "memory_predicted_bytes": max(one["peak_bytes"] for one in memory) if memory else None,
        "verdicts": len(run.verdicts),
    }


def layout_words(layout: Layout) -> str:
    """``dp 2, tp 2, zero 1``: the degrees above 1; ``one rank`` without any."""
    degrees = [("dp", layout.dp), ("tp", layout.tp), ("pp", layout.pp), ("cp", layout.cp)]
    words = [f"{name} {degree}" for name, degree in degrees if degree > 1]
    if layout.zero and layout.zero_ranks > 1:
        words.append(f"zero {layout.zero}")
    if layout.pp > 1:
        words.append(layout.schedule)
    return ", ".join(words) or "one rank"


def typical(column: Column | None, num_buckets: int) -> float | None:
    """Median over the second half of a run: without its warm-up, and whatever a few steps did."""
    if column is None or not column.mean:
        return None
    late = [m for at, m in zip(column.at, column.mean, strict=True) if at >= num_buckets // 2]
    return statistics.median(late or column.mean)


def typical_by_index(column: ListColumn | None, num_buckets: int) -> list[float | None]:
    """The same of each entry of a list."""
    if column is None:
        return []
    pairs = zip(column.at, column.rows, strict=True)
    late = [row for at, row in pairs if at >= num_buckets // 2] or column.rows
    found: list[float | None] = []
    for index in range(len(column.labels)):
        values = [row[index] for row in late if index < len(row)]
        numbers = [value for value in values if value is not None]
        found.append(statistics.median(numbers) if numbers else None)
    return found


def measured_bytes(run: Run) -> list[float | None]:
    """Newest peak memory of each pipeline rank, the largest of its ranks; empty if unknown."""
    column = run.metrics.lists.get("memory_bytes_by_rank")
    if run.config is None or column is None:
        return []
    layout, newest = Layout.from_config(run.config.parallel), column.rows[-1]
    found: list[float | None] = []
    for pp in range(layout.pp):
        ranks = (rank for first, past in layout.ranks_at_stage(pp) for rank in range(first, past))
        values = (newest[rank] for rank in ranks if rank < len(newest))
        found.append(max((value for value in values if value is not None), default=None))
    return found


def _state(run: Run, total: int | None) -> str:
    series = run.metrics
    if not series.step:
        return "empty"
    last = len(series.step) - 1
    losses = [series.columns[name] for name in ("loss", "grad_norm") if name in series.columns]
    if any(last in column.not_finite and last not in column.at for column in losses):
        return "diverged"
    return "done" if total is not None and series.step[-1] >= total else "unfinished"


def _largest(column: ListColumn | None) -> float | None:
    newest = column.rows[-1] if column and column.rows else []
    return max((value for value in newest if value is not None), default=None)
