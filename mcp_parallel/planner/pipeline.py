"""A pipeline's bubble, its exposed messages, and how many micro-batches it keeps alive. No torch.

Letters: p = pipeline ranks, v = stages of a rank, m = micro-batches, T = a rank's forward and
backward of one micro-batch, c = a message. With T the same on all ranks, a step takes m T and the
bubble:

    gpipe, 1f1b     (p - 1) T                       Huang et al. 2019; Narayanan et al. 2019
    interleaved     (p - 1) T / v                   Narayanan et al. 2021, section 2.2
    others          what ``schedules.simulate`` finds for 2 p micro-batches

Where the slowest rank takes more than the others it sets the pace: m times its T. A micro-batch
alone in 1f1b waits for its messages twice a round trip, 2 c, since the rank behind has nothing else
to do; with several stages there is other work meanwhile, and only the way through the empty
pipeline counts.
"""

from __future__ import annotations

from functools import lru_cache

from mcp_parallel.schedules.build import build_plan
from mcp_parallel.schedules.simulate import Costs, simulate

_BACKWARD = 2.0
"""Backward over forward, where a schedule is simulated: gradients of inputs and of weights."""


def bubble_units(schedule: str, pp: int, stages_per_rank: int) -> float:
    """The bubble as a number of a rank's T."""
    if pp == 1:
        return 0.0
    if schedule in ("gpipe", "1f1b"):
        return pp - 1.0
    if schedule == "interleaved":
        return (pp - 1.0) / stages_per_rank
    return _simulated_bubble(schedule, pp, stages_per_rank)


@lru_cache(maxsize=256)
def _simulated_bubble(schedule: str, pp: int, stages_per_rank: int) -> float:
    count = 2 * pp
    each = 1.0 / stages_per_rank
    plan = build_plan(schedule, pp, count, stages_per_rank)
    makespan = simulate(plan, Costs(each, each, each, 0.0)).makespan
    return makespan / (1.0 + _BACKWARD) - count


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
    fill = 2 * (pp - 1) * message_s
    if schedule == "gpipe":
        return fill
    if stages_per_rank == 1:
        return fill + 2 * num_microbatches * message_s
    beyond = max(0.0, 2 * stages_per_rank * message_s - pace)
    return fill + num_microbatches * beyond


def live_microbatches(
    schedule: str, pp: int, stages_per_rank: int, num_microbatches: int, rank: int
) -> float:
    """Micro-batches whose activations a rank keeps at its peak, in parts of all its stages.

    An interleaved rank warms up for (v - 1) p + 2 (p - r - 1) of its stages' forwards and adds one
    before the first backward; zbv keeps p halves twice, dualpipev one more.
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
        return float(min(pp + (schedule == "dualpipev"), num_microbatches))
    return float(min(pp - rank, num_microbatches))
