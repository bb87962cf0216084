"""What follows from a run's configuration: who is where, what it takes, what waits. No torch."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

from mcp_parallel.check import find_problems
from mcp_parallel.cli.check import summarize
from mcp_parallel.config import CheckpointConfig, Config, DataConfig
from mcp_parallel.division import is_settled
from mcp_parallel.layout import Coordinate, Layout
from mcp_parallel.model.traits import traits_of
from mcp_parallel.schedules.build import build_plan
from mcp_parallel.schedules.simulate import Costs, Timeline, simulate

MAX_RANKS = 512
"""Cells in the picture of a layout; of more ranks the first and the last of each axis are shown."""
MAX_REPLICAS = 8
MAX_ACTIONS = 4000
"""Boxes in the picture of a pipeline; of more micro-batches the first ones are drawn."""
_MAX_SIMULATED = 200_000
_KINDS = "FBIW"
_KEPT = ("parameters", "world_size", "microbatches", "memory", "stage_costs", "imbalance")


def facts_of(config: Config, notes: list[str]) -> dict[str, Any] | None:
    """Plain values for the page, None where the configuration is one that could not run here.

    Args:
        config: of a run, perhaps of another version.
        notes: is told why something cannot be shown.

    Returns:
        Of what ``mcp-parallel check --json`` says the keys ``parameters``, ``world_size``,
        ``microbatches``, ``memory``, ``stage_costs`` and ``imbalance``; ``layout`` (see
        ``layout_picture``), ``pipeline`` (see ``pipeline_picture``, None without one), and
        ``unit``: what a sample's tokens are called.

    Cost: that of ``check``; the pipeline takes a microsecond or two for each action.
    """
    # The data may be elsewhere by now, and says nothing about ranks.
    alone = dataclasses.replace(config, data=DataConfig(), checkpoint=CheckpointConfig())
    problems = [p for p in find_problems(alone) if not p.key.startswith(("data.", "checkpoint."))]
    if problems:
        notes.append(f"no layout can be shown: {problems[0]}")
        return None
    layout = Layout.from_config(config.parallel)
    summary = summarize(config)
    if summary["memory"] is None:
        notes.append("memory cannot be predicted for this kind of run")
    if not is_settled(config):
        notes.append("layers and shares are as modelled: the run measures them at its start")
    return {
        **{name: summary[name] for name in _KEPT},
        "unit": traits_of(config.model).unit,
        "layout": layout_picture(layout, summary),
        "pipeline": pipeline_picture(layout, summary["microbatches"], notes),
    }


def layout_picture(layout: Layout, summary: dict[str, Any]) -> dict[str, Any]:
    """Ranks by place: those that are shown.

    Args:
        layout: of the run.
        summary: of ``summarize``.

    Returns:
        The degrees; ``shown``: the places on the axes pp and dp that are drawn; ``ranks``: of each
        of these pp, of each of these dp, ``cp * tp`` global ranks, tp fastest; ``layers``: of each
        of these pp, the model's parts on it, ``[[first, past the last], ...]``; ``shares``: of
        each of these dp its micro-batches, where replicas differ.
    """
    plane, counts = layout.cp * layout.tp, summary["microbatches_by_dp_rank"]
    dps = _ends(layout.dp, min(MAX_REPLICAS, MAX_RANKS // (layout.pp * plane)))
    shown_pp = _ends(layout.pp, MAX_RANKS // (len(dps) * plane))

    def ranks(pp: int, dp: int) -> list[int]:
        places = (Coordinate(pp=pp, dp=dp, cp=cp, tp=tp) for cp, tp in _grid(layout))
        return [layout.rank_of(place) for place in places]

    return {
        "dp": layout.dp,
        "tp": layout.tp,
        "pp": layout.pp,
        "cp": layout.cp,
        "zero": layout.zero,
        "dp_replicate": layout.dp_replicate,
        "schedule": layout.schedule,
        "shown": {"pp": shown_pp, "dp": dps},
        "ranks": [[ranks(pp, dp) for dp in dps] for pp in shown_pp],
        "layers": [
            [stage["layers"] for stage in summary["stages"] if stage["pp_rank"] == pp]
            for pp in shown_pp
        ],
        "shares": [counts[dp] for dp in dps] if len(set(counts)) > 1 else None,
    }


def _ends(size: int, most: int) -> list[int]:
    """The places of an axis: all, or the first ones and the last; two at least."""
    if size <= max(2, most):
        return list(range(size))
    return [*range(max(1, most - 1)), size - 1]


def _grid(layout: Layout) -> list[tuple[int, int]]:
    """The places of a plane; at most ``MAX_RANKS``."""
    return [divmod(i, layout.tp) for i in range(min(MAX_RANKS, layout.cp * layout.tp))]


def pipeline_picture(layout: Layout, microbatches: int, notes: list[str]) -> dict[str, Any] | None:
    """One step of the pipeline on paper, forward : input gradient : weight gradient = 1 : 1 : 1.

    Returns:
        ``bubble``: idle part of each rank with all micro-batches; ``ranks``: the actions of each,
        ``[kind ("FBIW"), chunk, micro-batch, start, end]``, of ``shown`` micro-batches;
        ``makespan`` of those; no ranks where that is too many. None without a pipeline, and where
        it is too long to simulate.
    """
    if layout.pp == 1:
        return None
    if 3 * layout.num_stages * microbatches > _MAX_SIMULATED:
        notes.append(f"the pipeline of {microbatches} micro-batches is too long to draw")
        return None
    whole = _timeline(layout, microbatches)
    shown, drawn = _shown_microbatches(layout, microbatches), whole
    if shown < microbatches:
        drawn = _timeline(layout, shown)
    if sum(map(len, drawn.ranks)) > 4 * MAX_ACTIONS:
        notes.append(f"a pipeline of {layout.num_stages} stages has too many boxes to draw")
        shown = 0
    return {
        "schedule": layout.schedule,
        "pp": layout.pp,
        "chunks": layout.stages_per_rank,
        "microbatches": microbatches,
        "shown": shown,
        "makespan": round(drawn.makespan, 4),
        "bubble": [round(whole.bubble(rank), 6) for rank in range(layout.pp)],
        "ranks": [
            [
                [
                    _KINDS.index(span.action.kind),
                    span.action.chunk,
                    span.action.microbatch,
                    round(span.start, 4),
                    round(span.end, 4),
                ]
                for span in spans
            ]
            for spans in (drawn.ranks if shown else ())
        ],
    }


@cache
def _simulated(schedule: str, pp: int, microbatches: int, chunks: int) -> Timeline:
    plan = build_plan(schedule, pp, microbatches, chunks)
    return simulate(plan, Costs(1 / chunks, 1 / chunks, 1 / chunks))


def _timeline(layout: Layout, microbatches: int) -> Timeline:
    return _simulated(layout.schedule, layout.pp, microbatches, layout.stages_per_rank)


def _shown_microbatches(layout: Layout, microbatches: int) -> int:
    """As many as fit into ``MAX_ACTIONS``, in whole rounds, and two rounds at least."""
    fitting = MAX_ACTIONS // (3 * layout.num_stages) // layout.pp * layout.pp
    return min(microbatches, max(fitting, 2 * layout.pp))
