"""Why nothing fits, by how much, and what would. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mcp_parallel.planner.hardware import HARDWARE
from mcp_parallel.planner.layouts import Job
from mcp_parallel.planner.search import Fixed, Found, search

_DOUBLINGS = 10
_NEIGHBOURS = 8


def impossible(found: Found, fixed: Fixed | None = None) -> list[str]:
    """Lines for a job of which every layout was refused: an error message, and ways out.

    Args:
        found: a search that ranked nothing.
        fixed: what it was given.

    Cost: a search each for up to sixteen other numbers of ranks and for each larger card.
    """
    job, fixed = found.job, dict(fixed or {})
    what = f"{job.ranks} x {job.hardware.name}"
    nearest = found.refused[0] if found.refused else None
    if nearest is None or math.isinf(nearest.excess):
        counts = (f"{count} refused by {reason}" for reason, count in found.reasons().items())
        reasons = ", ".join(counts) or "no degrees have this product"
        problem = f"plan: the model must have a layout on {what}, got none ({reasons})"
        ways = list(_ways_out(job, fixed, _near(job.ranks)))
        return [f"{problem}; use {', or '.join(ways) or 'another batch'}"]
    else:
        problem = (
            f"plan: the model must fit on {what}, got {100 * nearest.excess:.0f} % too much: "
            f"{nearest.layout} {nearest.detail}"
        )
    doubled = [job.ranks << doublings for doublings in range(1, _DOUBLINGS + 1)]
    ways = list(_ways_out(job, fixed, doubled))
    advice = f"; use {', or '.join(ways)}" if ways else "; use a smaller model"
    return [problem + advice]


def _near(ranks: int) -> list[int]:
    """Numbers of ranks around one that no layout divides, nearest first, the smaller before."""
    steps = range(1, _NEIGHBOURS + 1)
    return [count for step in steps for count in (ranks - step, ranks + step) if count > 0]


def _ways_out(job: Job, fixed: dict[str, object], counts: Sequence[int]) -> Iterator[str]:
    """Changes that were tried and found to work; ``counts`` are ranks to try in this order."""
    if fixed:
        free = search(job)
        if free.ranked:
            yield f"{free.ranked[0].layout} in place of what is fixed"
            return
    for ranks in counts:
        if search(replace(job, ranks=ranks), fixed=fixed).ranked:
            yield f"{ranks} ranks"
            break
    if job.hardware.name not in {card.name for card in HARDWARE.values()}:
        return  # a machine at hand is not exchanged for a card
    larger = (
        (name, card)
        for name, card in HARDWARE.items()
        if card.memory_bytes > job.hardware.memory_bytes and job.precision in card.peak_flops
    )
    for name, card in sorted(larger, key=lambda pair: pair[1].memory_bytes):
        if search(replace(job, hardware=card), fixed=fixed).ranked:
            yield f"--gpu {name}"
            break
