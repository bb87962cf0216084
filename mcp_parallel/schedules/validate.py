"""Whether a plan is one: everything once, on its rank, in an order that can run. No torch."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from mcp_parallel.schedules.action import Plan
from mcp_parallel.schedules.simulate import simulate


def validate(plan: Plan) -> None:
    """Check a plan, whoever made it.

    Raises:
        ValueError: an action is missing, twice or on a rank that does not hold its stage, a W
            comes before its I, ranks wait for each other (``DeadlockError``), or more activations
            stay alive than ``most_alive`` allows.

    Cost: a simulation.
    """
    seen: Counter[tuple[str, int, int]] = Counter()
    for rank, order in enumerate(plan.orders):
        for action in order:
            if not 0 <= action.stage < plan.num_stages or plan.owner(action.stage) != rank:
                raise ValueError(f"validate: rank {rank} must hold its stages, got {action}")
            parts = ("I", "W") if action.kind == "B" else (action.kind,)
            seen.update((part, action.stage, action.microbatch) for part in parts)
    wanted = {
        (kind, stage, microbatch)
        for kind in "FIW"
        for stage in range(plan.num_stages)
        for microbatch in range(plan.num_microbatches)
    }
    for key in sorted(wanted | set(seen)):
        if seen[key] != (key in wanted):
            kind, stage, microbatch = key
            raise ValueError(
                f"validate: {kind}{microbatch} of stage {stage} must run "
                f"{'once' if key in wanted else 'never'}, got {seen[key]} times"
            )
    simulate(plan)
    for rank, alive in enumerate(peak_alive(plan)):
        bound = most_alive(plan, rank)
        if alive > bound:
            raise ValueError(
                f"validate: rank {rank} must keep at most {bound} micro-batches alive with "
                f"schedule {plan.schedule}, got {alive}"
            )


def peak_alive(plan: Plan) -> list[Fraction]:
    """Most activations that each rank holds at once, in micro-batches of a whole rank.

    A chunk's activations live from its F to its B or W: input gradients alone free nothing that
    weight gradients read.
    """
    peaks = []
    for order in plan.orders:
        alive = peak = 0
        for action in order:
            alive += {"F": 1, "B": -1, "W": -1, "I": 0}[action.kind]
            peak = max(peak, alive)
        peaks.append(Fraction(peak, plan.chunks))
    return peaks


def most_alive(plan: Plan, rank: int) -> Fraction:
    """What the schedule's source promises for ``peak_alive``.

    GPipe m; 1F1B p - r; interleaved (v - 1) p + 2 (p - r - 1) + 1 chunks; zero bubble
    (v - 1) p + p chunks, which is 1F1B's p for one chunk; ZB-V 2p chunks, so p; DualPipe's V
    2p + 1 chunks. Never more than all micro-batches.
    """
    p, v, m = plan.pp, plan.chunks, plan.num_microbatches
    chunks = {
        "gpipe": m * v,
        "1f1b": p - rank,
        "interleaved": (v - 1) * p + 2 * (p - rank - 1) + 1,
        "zero_bubble": v * p,
        "zbv": 2 * p,
        "dualpipev": 2 * p + 1,
    }[plan.schedule]
    return Fraction(min(chunks, m * v), v)
