"""What each pipeline rank holds: blocks, embedding, head, and so its parameters. No torch."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from mcp_parallel.config import Schedule
from mcp_parallel.layout import Layout, split_layers
from mcp_parallel.planner.layouts import PlannedLayout
from mcp_parallel.planner.shape import Shape


class RankStages(NamedTuple):
    """Of one pipeline rank."""

    layers: int
    has_embedding: bool
    has_head: bool
    neighbours: int
    """Borders between a stage of this rank and one of another rank."""


def rank_stages(num_layers: int, layout: PlannedLayout) -> tuple[RankStages, ...]:
    """By pipeline rank, as ``layout.split_layers`` shares the blocks out."""
    return _rank_stages(num_layers, layout.schedule, layout.pp, layout.virtual_stages)


@lru_cache(maxsize=4096)
def _rank_stages(
    num_layers: int, schedule: Schedule, pp: int, virtual_stages: int
) -> tuple[RankStages, ...]:
    layout = Layout(pp=pp, schedule=schedule, virtual_stages=virtual_stages)
    ranges = split_layers(num_layers, layout.num_stages)
    last = layout.num_stages - 1
    owner = [layout.stage_owner(stage) for stage in range(layout.num_stages)]
    found = []
    for rank in range(pp):
        mine = [stage for stage in range(layout.num_stages) if owner[stage] == rank]
        borders = sum(
            owner[other] != rank
            for stage in mine
            for other in (stage - 1, stage + 1)
            if 0 <= other <= last
        )
        layers = sum(len(ranges[stage]) for stage in mine)
        found.append(RankStages(layers, 0 in mine, last in mine, borders))
    return tuple(found)


def rank_parameters(shape: Shape, stages: RankStages, tp: int) -> float:
    """Elements on one of the tp ranks of a pipeline rank."""
    return stages.layers * shape.block.on_rank(tp) + end_parameters(shape, stages, tp)


def end_parameters(shape: Shape, stages: RankStages, tp: int) -> float:
    """Of them those of embedding, last norm and head."""
    held = stages.has_embedding * shape.embedding.on_rank(tp)
    held += stages.has_head * shape.head.on_rank(tp)
    return held - (stages.has_embedding and stages.has_head) * shape.tied / tp
