"""Work shared out so that whoever has most has least: layers to stages, micro-batches to replicas.

Both are one problem. Each receiver starts with the least it may have, and each further unit goes to
the one that it leaves with the smallest load. Where loads grow with what is given, no other way has
a smaller largest load: were there one, some receiver would have fewer units in it than here, and
the unit that was given here beyond those would have gone to another, who was below that load.

No torch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mcp_parallel.config import Config
from mcp_parallel.layout import Layout
from mcp_parallel.planner.shape import shape_of

Load = Callable[[int, int], float]
"""(receiver, units) -> what they cost there; grows with the units."""


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """What a sample costs in each part of a model, forward and backward, in one unit of any kind.

    A model's blocks are alike. Embedding and head are what a stage costs beyond its blocks when it
    is the first or the last; the loss is part of the head.
    """

    embedding: float
    block: float
    head: float

    def of_stage(self, num_layers: int, *, is_first: bool, is_last: bool) -> float:
        """The cost of a stage of so many blocks."""
        return num_layers * self.block + is_first * self.embedding + is_last * self.head


def share_out(
    units: int, least: Sequence[int], load: Load, *, step: int = 1, most: int | None = None
) -> list[int]:
    """Units of each receiver, so that the largest load is least; the earlier wins a tie.

    Args:
        units: to share out, at least the sum of ``least`` and that plus a multiple of ``step``.
        least: units that each receiver has anyway.
        load: of a receiver with so many units.
        step: units that are given at a time.
        most: of one receiver; None is no limit.

    Cost: units log receivers.
    """
    given = list(least)
    heap = [(load(who, count + step), who) for who, count in enumerate(given)]
    heapq.heapify(heap)
    for _ in range((units - sum(given)) // step):
        while most is not None and given[heap[0][1]] + step > most:
            heapq.heappop(heap)
        _, who = heap[0]
        given[who] += step
        heapq.heapreplace(heap, (load(who, given[who] + step), who))
    return given


def split_by_cost(
    num_layers: int, layout: Layout, costs: LayerCosts, slowness: Sequence[float] | None = None
) -> list[int]:
    """Blocks of each stage, so that the largest sum over a pipeline rank's stages is least.

    Each rank's blocks are then dealt to its own stages in the same way. Every stage has a block.

    Args:
        num_layers: of the model, at least one a stage.
        layout: its stages and which rank has which.
        costs: of the model's parts.
        slowness: time of each pipeline rank for the same work, in any unit; None is alike.
    """
    last = layout.num_stages - 1
    stages = [layout.stages_of(rank) for rank in range(layout.pp)]
    pace = [1.0] * layout.pp if slowness is None else list(slowness)

    def rank_load(rank: int, blocks: int) -> float:
        ends = {"is_first": 0 in stages[rank], "is_last": last in stages[rank]}
        return pace[rank] * costs.of_stage(blocks, **ends)

    split = [0] * layout.num_stages
    totals = share_out(num_layers, [len(own) for own in stages], rank_load)
    for own, total in zip(stages, totals, strict=True):

        def stage_load(which: int, blocks: int, own: list[int] = own) -> float:
            stage = own[which]
            return costs.of_stage(blocks, is_first=stage == 0, is_last=stage == last)

        for stage, blocks in zip(own, share_out(total, [1] * len(own), stage_load), strict=True):
            split[stage] = blocks
    return split


def rank_costs(
    split: Sequence[int],
    layout: Layout,
    costs: LayerCosts,
    slowness: Sequence[float] | None = None,
) -> list[float]:
    """What a micro-batch costs each pipeline rank, all its stages together, in ``costs``' unit."""
    last = layout.num_stages - 1
    pace = [1.0] * layout.pp if slowness is None else slowness
    return [
        pace[rank]
        * sum(
            costs.of_stage(split[stage], is_first=stage == 0, is_last=stage == last)
            for stage in layout.stages_of(rank)
        )
        for rank in range(layout.pp)
    ]


def stage_factors(split: Sequence[int], costs: LayerCosts) -> tuple[float, ...]:
    """Cost of each stage over the stages' mean: what ``schedules.simulate`` takes of a split."""
    last = len(split) - 1
    each = [
        costs.of_stage(blocks, is_first=stage == 0, is_last=stage == last)
        for stage, blocks in enumerate(split)
    ]
    return tuple(cost * len(each) / sum(each) for cost in each)


def imbalance(loads: Sequence[float]) -> float:
    """How much longer the largest load is than the mean, 0 when all are alike.

    The part of its time that a pipeline waits for its slowest rank is ``x / (1 + x)`` of it.
    """
    return max(loads) * len(loads) / sum(loads) - 1


def choose_shares(
    speeds: Sequence[float], units: int, *, step: int = 1, least: int = 1
) -> tuple[int, ...]:
    """Micro-batches of each replica, so that the last one is done as early as can be.

    Args:
        speeds: of the replicas, in any unit, above 0.
        units: micro-batches of the global batch.
        step: number that each count is a multiple of.
        least: that each replica must have.

    Raises:
        ValueError: a speed is not above 0, or there are too few units.
    """
    if any(not 0 < speed < math.inf for speed in speeds):
        raise ValueError(f"choose_shares: speeds must be above 0, got {list(speeds)}; measure anew")
    start = -(-least // step) * step
    if units < start * len(speeds) or units % step:
        enough = -(-max(units, start * len(speeds)) // step) * step
        raise ValueError(
            f"choose_shares: units must be a multiple of {step} and at least {start} for each of "
            f"{len(speeds)} replicas, got {units}; use {enough}"
        )
    return tuple(share_out(units, [start] * len(speeds), lambda who, n: n / speeds[who], step=step))


def modelled_costs(config: Config) -> LayerCosts:
    """Floating-point operations of a sample in each part of the model, forward and backward.

    A product of [N, a] and [a, b] is 2 N a b, and twice that backward. Attention recomputes its
    scores backward, and under a causal mask does half. Lookups, norms and element-wise work are
    left out: bytes, not operations, are what they take.
    """
    model, memory = config.model, config.memory
    hidden, length = model.hidden_size, model.seq_len
    shape = shape_of(model)
    weights, seen = shape.block_matrices, shape.seen * length
    forward = length * (2 * weights + 4 * seen * hidden)
    backward = length * (4 * weights + 10 * seen * hidden)
    again = forward if memory.activation_checkpointing == "full" else 0.0
    # Images need no gradient; a looked-up row's takes an addition.
    embedding = float(length * (4 * shape.embedding_matrix or hidden))
    head = 6.0 * shape.head_positions * shape.head_matrix
    return LayerCosts(embedding=embedding, block=forward + backward + again, head=head)
