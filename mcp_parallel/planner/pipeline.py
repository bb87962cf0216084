"""A pipeline's bubble, its exposed messages, and how many micro-batches it keeps alive. No torch.

Letters: p = pipeline ranks, v = stages of a rank, m = micro-batches, T = a rank's forward and
backward of one micro-batch, c = a message. With T the same on all ranks, a step takes m T and

                    bubble          messages
    gpipe           (p - 1) T       2 (p - 1) c                     Huang et al. 2019
    1f1b            (p - 1) T       (2 (p - 2) + 2 m (p - 1) / p) c Narayanan et al. 2019
    interleaved     (p - 1) T / v   2 (p v - 1) c                   Narayanan et al. 2021, 2.2
    others          what ``schedules.simulate`` finds for 2 p micro-batches

Messages are those of a pipeline whose ranks work on while they send. In 1f1b the rank behind has
nothing else to do than wait for an answer, so each micro-batch pays; in the others only the way
through the empty pipeline counts. A test holds all of this against simulated schedules. Where the
slowest rank takes more than the others it sets the pace: m times its T.
"""

from __future__ import annotations

from functools import lru_cache

from mcp_parallel.schedules.build import build_plan
from mcp_parallel.schedules.simulate import Costs, simulate

_PASSES = 3.0
"""T of a simulated rank: a forward pass and gradients of inputs and weights of one unit each."""
_MESSAGE = 1e-3
"""Of a simulated message; short, as messages beside a stage's work are."""


def bubble_units(schedule: str, pp: int, stages_per_rank: int) -> float:
    """The bubble as a number of a rank's T."""
    if pp == 1:
        return 0.0
    if schedule in ("gpipe", "1f1b"):
        return pp - 1.0
    if schedule == "interleaved":
        return (pp - 1.0) / stages_per_rank
    return _simulated(schedule, pp, stages_per_rank)[0]


@lru_cache(maxsize=256)
def _simulated(schedule: str, pp: int, stages_per_rank: int) -> tuple[float, float]:
    """(bubble in T, waiting for messages in c)."""
    count, each = 2 * pp, 1.0 / stages_per_rank
    plan = build_plan(schedule, pp, count, stages_per_rank)
    alone = simulate(plan, Costs(each, each, each, 0.0)).makespan
    waiting = simulate(plan, Costs(each, each, each, _MESSAGE)).makespan - alone
    return alone / _PASSES - count, waiting / _MESSAGE


def exposed_messages_seconds(
    schedule: str,
    pp: int,
    stages_per_rank: int,
    num_microbatches: int,
    message_s: float,
    pace: float,
) -> float:
    """What messages between stages add to a step.

    Args:
        schedule: name.
        pp: p.
        stages_per_rank: v.
        num_microbatches: m.
        message_s: c, one way.
        pace: T of the slowest rank; messages beside it are hidden as far as they take less.
    """
    if pp == 1:
        return 0.0
    if schedule == "gpipe":
        units = 2.0 * (pp - 1)
    elif schedule == "1f1b":
        units = 2.0 * (pp - 2) + 2.0 * num_microbatches * (pp - 1) / pp
    elif schedule == "interleaved":
        units = 2.0 * (pp * stages_per_rank - 1)
    else:
        units = _simulated(schedule, pp, stages_per_rank)[1]
    # A rank sends and receives for each of its stages: links can be busier than processors.
    beyond = max(0.0, 2 * stages_per_rank * message_s - pace)
    return units * message_s + num_microbatches * beyond


def live_microbatches(
    schedule: str, pp: int, stages_per_rank: int, num_microbatches: int, rank: int
) -> float:
    """Micro-batches whose activations a rank keeps at its peak, in parts of all its stages.

    An interleaved rank warms up for (v - 1) p + 2 (p - r - 1) of its stages' forwards and adds one
    before the first backward; zbv keeps 2 p halves, dualpipev one more.
    """
    if pp == 1:
        return 1.0
    if schedule == "gpipe":
        return float(num_microbatches)
    if schedule == "interleaved":
        units = (stages_per_rank - 1) * pp + 2 * (pp - rank - 1) + 1
        return min(units, num_microbatches * stages_per_rank) / stages_per_rank
    if schedule == "zero_bubble" and stages_per_rank > 1:
        units = (stages_per_rank - 1) * pp + (pp - rank - 1) + 1
        return min(units + rank, num_microbatches * stages_per_rank) / stages_per_rank
    if schedule == "zero_bubble":  # weight gradients of `rank` micro-batches wait
        return float(min(pp, num_microbatches))
    if schedule in ("zbv", "dualpipev"):
        return min(pp + 0.5 * (schedule == "dualpipev"), float(num_microbatches))
    return float(min(pp - rank, num_microbatches))
