"""The classic rule for degrees, as a named baseline, and what is wrong with it for a job. No torch.

    MP = ceil(sqrt(parameters / 1e9)),  total = MP * CP * PP,  PP <= layers / 5

MP is read as tp; ranks beyond the product become data-parallel replicas. The bound on PP holds for
every published row of ``published.py``; MP meets tp * pp in one row of nine (16B).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from mcp_parallel.errors import joined
from mcp_parallel.planner.layouts import Job, PlannedLayout
from mcp_parallel.planner.memory import USABLE, peak_memory
from mcp_parallel.planner.search import Found
from mcp_parallel.presets import num_parameters
from mcp_parallel.rules.problem import divisors

_LAYERS_A_STAGE = 5


class RuleOfThumb(NamedTuple):
    """The rule's degrees for a job."""

    layout: PlannedLayout
    problems: list[str]
    """What is wrong with them; empty where the rule's layout can run."""
    times_slower: float | None
    """Predicted step over the best one's, where it can run."""

    def to_mapping(self) -> dict[str, Any]:
        """Plain values."""
        verdict = {"problems": self.problems, "times_slower": self.times_slower}
        return {**self.layout.to_mapping(), **verdict}


def rule_of_thumb(job: Job, found: Found, cp: int = 1) -> RuleOfThumb:
    """The rule beside what a search found.

    Args:
        job: what runs.
        found: the search of it.
        cp: context-parallel ranks, which the rule takes as given.
    """
    model = job.model
    tp = math.ceil(math.sqrt(num_parameters(model) / 1e9))
    pp = max(1, min(model.num_layers // _LAYERS_A_STAGE, job.ranks // (tp * cp)))
    dp = max(1, job.ranks // (tp * cp * pp))
    layout = PlannedLayout(dp, tp, pp, cp, "1f1b", 1, 1, 0, "none")
    same = [one for one in found.ranked if one.layout.degrees == layout.degrees]
    if same:
        return RuleOfThumb(same[0].layout, [], same[0].cost.step_s / found.ranked[0].cost.step_s)
    return RuleOfThumb(layout, list(_problems(job, layout)), None)


def _problems(job: Job, layout: PlannedLayout) -> list[str]:
    """Why the layout cannot run here."""
    model, tp = job.model, layout.tp
    found = []
    common = math.gcd(model.num_heads, model.num_kv_heads)
    if common % tp:
        fitting = [degree for degree in divisors(common) if degree <= job.hardware.domain_ranks]
        found.append(
            f"tp = {tp} does not divide {model.num_heads} heads and {model.num_kv_heads} key and "
            f"value heads; {joined(fitting)} do"
        )
    if job.hardware.domain_ranks % tp:
        found.append(f"tp groups of {tp} do not fit domains of {job.hardware.domain_ranks} ranks")
    product = math.prod(layout.degrees)
    if product > job.ranks:
        found.append(f"it takes {product} ranks of {job.ranks}")
    elif product < job.ranks:
        found.append(f"it leaves {job.ranks - product} of {job.ranks} ranks without work")
    if job.global_batch_size % layout.dp:
        found.append(f"dp = {layout.dp} does not divide a batch of {job.global_batch_size}")
    elif job.num_microbatches(layout) < layout.pp:
        found.append(
            f"{job.num_microbatches(layout)} micro-batches do not fill {layout.pp} pipeline ranks"
        )
    need, limit = peak_memory(job, layout).total, USABLE * job.hardware.memory_bytes
    if need > limit:
        found.append(
            f"it needs {need / 2**30:.0f} GiB of the {limit / 2**30:.0f} that are usable, with "
            "whole copies of the optimizer's state"
        )
    return found or ["no variant of it was found to run"]
