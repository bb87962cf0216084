"""What data parallelism adds to a step: gradients, gathered weights, the optimizer. No torch.

P = parameters of a rank, n = dp * cp ranks that hold the same ones, m = micro-batches, F and B = a
rank's passes of one micro-batch.

    zero 0   all-reduce of P gradients, beside the last micro-batch's B
    zero 1   reduce-scatter of P gradients beside it; all-gather of P weights beside the first F
    zero 2   the reduce-scatter after each micro-batch
    zero 3   and two all-gathers in each micro-batch, for F and for B

What is first gathered and last reduced, a block's weights, has nothing to run beside. A rank with v
stages has finished the first of them long before the last: its window is p micro-batches longer.
"""

from __future__ import annotations

from typing import NamedTuple

from mcp_parallel.planner.block import exposed
from mcp_parallel.planner.layouts import Job, PlannedLayout
from mcp_parallel.planner.links import all_gather_seconds
from mcp_parallel.planner.roofline import memory_seconds
from mcp_parallel.planner.topology import Group

STEP_BYTES = 34
"""AdamW reads weight, gradient and two moments in fp32, writes three of them and a 16-bit weight;
the global norm reads the gradient once more."""


class Windows(NamedTuple):
    """Seconds of work of one rank beside which its collectives can run."""

    forward: float
    """F."""
    backward: float
    """B."""
    first: float
    """From the start of the first stage's first pass to that of the last stage's."""
    last: float
    """Likewise at the end."""


def windows_of(
    layout: PlannedLayout, num_microbatches: int, forward: float, backward: float
) -> Windows:
    """The windows of a rank whose passes of one micro-batch take ``forward`` and ``backward``."""
    stages = layout.stages_per_rank
    passes = 1.0
    if layout.pp > 1 and stages > 1:
        passes = min(num_microbatches, layout.pp) * (stages - 1) / stages + 1 / stages
    return Windows(forward, backward, passes * forward, passes * backward)


def sharding_seconds(
    job: Job,
    layout: PlannedLayout,
    group: Group,
    parameters: float,
    layers: int,
    windows: Windows,
) -> float:
    """What collectives over data-parallel ranks add to a step.

    Args:
        job: what runs.
        layout: its layout.
        group: the dp * cp ranks.
        parameters: P.
        layers: blocks of a rank, each of which is one collective.
        windows: of the rank.
    """
    if group.ranks == 1:
        return 0.0
    parts = layers + 1
    gather = all_gather_seconds(job.compute_bytes * parameters / parts, group, job.hardware)
    reduce = all_gather_seconds(job.runtime.reduce_bytes * parameters / parts, group, job.hardware)
    count = job.num_microbatches(layout)
    if layout.zero == 0:
        return _beside(job, 2 * reduce, parts, windows.last)
    if layout.zero == 1 or (layout.zero == 2 and layout.pp > 1):
        forward = _beside(job, gather, parts, windows.first)
        return forward + _beside(job, reduce, parts, windows.last)
    if layout.zero == 2:
        forward = _beside(job, gather, parts, windows.first)
        return forward + count * _beside(job, reduce, parts, windows.backward)
    forward = _beside(job, gather, parts, windows.forward)
    backward = _beside(job, gather + reduce, parts, windows.backward)
    return count * (forward + backward)


def _beside(job: Job, part_seconds: float, parts: int, window: float) -> float:
    """What ``parts`` collectives add, of which all but one can run beside ``window`` seconds."""
    if not job.runtime.dp_overlaps:
        return parts * part_seconds
    others = (parts - 1) * part_seconds
    return part_seconds + exposed(others, window, job.hardware)


def optimizer_seconds(job: Job, layout: PlannedLayout, ranks: int, parameters: float) -> float:
    """The update of the elements that a rank owns."""
    owned = parameters / ranks if layout.zero else parameters
    return memory_seconds(job.hardware, STEP_BYTES * owned)
