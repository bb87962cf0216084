"""The planner against published runs: predicted speed, and whether it would have chosen them.

One constant is fitted for each type of GPU, its ``matmul_efficiency``, on every other row of that
type in the order of the tables; predictions are judged on the rows between. A layout counts as
found when its degrees (dp, tp, pp, cp) are among the three that the planner ranks first. No torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mcp_parallel.planner.hardware import Hardware
from mcp_parallel.planner.published import RUNS, Run
from mcp_parallel.planner.search import Ranked, search

TOP = 3
_ROUNDS = 6
"""Of the fit; each takes most of what is left of the mean error."""


@dataclass(frozen=True)
class Judged:
    """A row beside what was predicted of it."""

    run: Run
    is_fitted: bool
    """Whether the constant of its type was fitted on it."""
    predicted: Ranked
    place: int | None
    """Of its degrees in a free search; None where the planner refuses them."""
    place_held: int | None
    """Of its degrees where what the experiment held fixed is given."""
    is_open: bool
    """Whether what was held leaves several degrees to choose from."""
    best_tflops: float
    """Predicted of what the free search ranks first."""
    most_memory: float
    """Part of a card that one of the first three takes."""

    @property
    def tflops(self) -> float:
        """Predicted, as the source counts work."""
        return self.predicted.cost.tflops(self.run.job, causal=self.run.causal)

    @property
    def error(self) -> float:
        """Predicted over published, less 1."""
        return self.tflops / self.run.tflops - 1

    @property
    def regret(self) -> float:
        """How much slower the published layout is predicted to be than the planner's first."""
        return self.best_tflops / self.tflops - 1


@dataclass(frozen=True)
class Summary:
    """Figures over rows."""

    rows: int
    median_error: float
    """Of the absolute errors."""
    rank_correlation: float
    """Spearman's."""
    found: int
    """Rows among the first three, in a free search."""
    found_held: int
    """With what was held fixed given."""
    open_rows: int
    """Where that leaves a choice."""
    found_open: int
    """Of them."""
    median_regret: float
    most_memory: float


def predict(run: Run) -> Ranked:
    """The fastest variant of a published layout, filling in what the source does not say.

    It was run, so it is predicted even if the planner would not recommend it: with four times the
    memory where it does not fit.
    """
    for times in (1, 4):
        card = replace(run.hardware, memory_bytes=times * run.hardware.memory_bytes)
        found = search(replace(run.job, hardware=card), fixed=run.layout)
        if found.ranked:
            return found.ranked[0]
    raise ValueError(f"predict: run must have a legal layout, got {run.name}: {found.refused[:1]}")


def is_fitted(run: Run, runs: Sequence[Run] = RUNS) -> bool:
    """Whether a row is in the half that constants are fitted on."""
    same = [other for other in runs if other.hardware.name == run.hardware.name]
    return same.index(run) % 2 == 0


def fit(runs: Sequence[Run] = RUNS) -> dict[str, float]:
    """``matmul_efficiency`` by hardware name: no mean error in logarithms on the fitted half."""
    fitted: dict[str, float] = {}
    for name in dict.fromkeys(run.hardware.name for run in runs):
        rows = [run for run in runs if run.hardware.name == name and is_fitted(run, runs)]
        constant = rows[0].hardware.matmul_efficiency
        for _ in range(_ROUNDS):
            moved = [with_constants(run, {name: constant}) for run in rows]
            errors = [
                math.log(run.tflops / predict(run).cost.tflops(run.job, causal=run.causal))
                for run in moved
            ]
            constant *= math.exp(statistics.mean(errors))
        fitted[name] = constant
    return fitted


def with_constants(run: Run, constants: Mapping[str, float]) -> Run:
    """A row on hardware with a fitted constant."""
    hardware: Hardware = run.hardware
    constant = constants.get(hardware.name, hardware.matmul_efficiency)
    return replace(run, hardware=replace(hardware, matmul_efficiency=constant))


def judge(runs: Sequence[Run] = RUNS, constants: Mapping[str, float] | None = None) -> list[Judged]:
    """Every row, predicted with the constants.

    Cost: two searches a row, together some 30 seconds of a core.
    """
    constants = fit(runs) if constants is None else constants
    return [_judge(with_constants(run, constants), is_fitted(run, runs)) for run in runs]


def _judge(run: Run, fitted: bool) -> Judged:
    free = search(run.job).ranked
    held = search(run.job, fixed=run.held).ranked if run.held else free
    first = free[:TOP]
    return Judged(
        run=run,
        is_fitted=fitted,
        predicted=predict(run),
        place=_place(free, run),
        place_held=_place(held, run),
        is_open=len(held) > 1,
        best_tflops=free[0].cost.tflops(run.job, causal=run.causal),
        most_memory=max(one.memory.total for one in first) / run.hardware.memory_bytes,
    )


def _place(ranked: Sequence[Ranked], run: Run) -> int | None:
    degrees = [one.layout.degrees for one in ranked]
    return degrees.index(run.degrees) + 1 if run.degrees in degrees else None


def summarize(rows: Sequence[Judged]) -> Summary:
    """Figures over rows, at least two."""
    in_held = [row for row in rows if row.place_held is not None and row.place_held <= TOP]
    return Summary(
        rows=len(rows),
        median_error=statistics.median(abs(row.error) for row in rows),
        rank_correlation=spearman([r.tflops for r in rows], [r.run.tflops for r in rows]),
        found=sum(row.place is not None and row.place <= TOP for row in rows),
        found_held=len(in_held),
        open_rows=sum(row.is_open for row in rows),
        found_open=sum(row.is_open for row in in_held),
        median_regret=statistics.median(row.regret for row in rows),
        most_memory=max(row.most_memory for row in rows),
    )


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Correlation of ranks; equal values share the mean of their ranks."""
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]
