"""Where hosts end in a layout, and what its groups send from one to another. No torch.

Ranks are numbered host by host, as every launcher does: rank r stands on host r // ranks_per_host.
Letters: n = ranks of a group, P = parameters of a rank, m = micro-batches of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mcp_parallel.config import Config
from mcp_parallel.layout import Layout
from mcp_parallel.presets import num_parameters

AXES = ("tp", "cp", "pp", "dp_cp")
_COMPUTE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
# Gradients are summed in the format of the master weights.
_GRADIENT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 4, "fp16": 4}
# 1-bit Adam sends a bit an element, and a float32 scale for each 1,024.
_ONEBIT_BYTES = 1 / 8 + 4 / 1024


@dataclass(frozen=True, slots=True)
class Crossing:
    """One axis of a layout on hosts."""

    axis: str
    """tp, cp, pp, or dp_cp: the ranks that hold the same parameters."""
    hosts: int
    """That one group stands on, the most of any."""
    num_bytes: int
    """That the busiest host sends to others in a step, 0 where every group stays on a host."""


def crossings(config: Config, ranks_per_host: int) -> list[Crossing]:
    """What each axis of more than one rank sends from host to host in a step.

    A collective counts as a ring in the order of its ranks, which is what crosses hosts least:
    all-reduce 2 (n - 1) / n of its bytes over each edge, all-gather and reduce-scatter half of it.

    - dp_cp: the gradients once, 2 P with ZeRO 0; with ZeRO 1 and 2 reduced to their owners and the
      parameters gathered; with ZeRO 3 gathered twice for each micro-batch. After 1-bit Adam's
      switch a bit an element instead.
    - pp: activations to the next stage and their gradients back, for each micro-batch.
    - tp: of each layer and micro-batch, two gathers and two reduce-scatters of the activations in
      each direction.
    - cp: of each layer and micro-batch, keys and values forward, and again with their gradients
      backward.

    Parameters are taken as shared evenly between stages.

    Args:
        config: has passed ``check``.
        ranks_per_host: ranks of each host, >= 1.

    Cost: linear in the ranks; 20 ms for 10,000.
    """
    layout = Layout.from_config(config.parallel)
    found = []
    for axis in AXES:
        if getattr(layout, axis) == 1:
            continue
        sent: Counter[int] = Counter()
        most = 1
        edge_bytes = _edge_bytes(config, layout, axis)
        for line in _lines(layout, axis):
            most = max(most, len({rank // ranks_per_host for rank in line}))
            for source, target in _edges(layout, axis, line):
                if source // ranks_per_host != target // ranks_per_host:
                    sent[source // ranks_per_host] += 1
        busiest = max(sent.values(), default=0)
        found.append(Crossing(axis, most, round(busiest * edge_bytes)))
    return found


def _lines(layout: Layout, axis: str) -> Iterator[list[int]]:
    """The groups along ``axis``, each in the order of its ranks."""
    moving = {"dp", "cp"} if axis == "dp_cp" else {axis}
    lines: dict[tuple[int, ...], list[int]] = {}
    for place in layout.places():
        fixed = tuple(getattr(place, a) for a in ("pp", "dp", "cp", "tp") if a not in moving)
        lines.setdefault(fixed, []).append(layout.rank_of(place))
    return iter(lines.values())


def _edges(layout: Layout, axis: str, line: list[int]) -> Iterator[tuple[int, int]]:
    """(sender, receiver) of each message of ``_edge_bytes``: round a ring, or down a pipeline."""
    if axis != "pp":
        yield from zip(line, line[1:] + line[:1], strict=True)
        return
    for stage in range(layout.num_stages - 1):
        here, there = layout.stage_owner(stage), layout.stage_owner(stage + 1)
        if here != there:  # the point of a V
            yield line[here], line[there]
            yield line[there], line[here]


def _edge_bytes(config: Config, layout: Layout, axis: str) -> float:
    """Bytes over one of ``_edges`` in a step."""
    model, train = config.model, config.train
    compute = _COMPUTE_BYTES[train.precision]
    microbatches = train.global_batch_size // (layout.dp * train.micro_batch_size)
    tokens = train.micro_batch_size * model.seq_len // layout.cp
    activations = microbatches * tokens * model.hidden_size * compute
    layers = model.num_layers / layout.pp
    if axis == "pp":
        shared = layout.tp if layout.sequence_parallel else 1
        return activations / shared
    size = layout.dp_cp if axis == "dp_cp" else getattr(layout, axis)
    share = (size - 1) / size
    if axis == "tp":
        return 8 * share * activations * layers
    if axis == "cp":
        width = model.num_kv_heads / model.num_heads / layout.tp
        return 3 * 2 * share * activations * layout.cp * width * layers
    parameters = num_parameters(model) / (layout.pp * layout.tp)
    if train.optimizer == "onebit_adam":
        return 2 * share * parameters * _ONEBIT_BYTES
    gradients = parameters * _GRADIENT_BYTES[train.precision]
    if layout.zero == 0:
        return 2 * share * gradients
    gathers = 2 * microbatches if layout.zero == 3 else 1
    return share * (gradients + gathers * parameters * compute)


def cuts_between(ranks_per_host: int, world_size: int) -> range:
    """The first rank of each host but the first."""
    return range(ranks_per_host, world_size, ranks_per_host)


def cuts_around(first: int, count: int, world_size: int) -> list[int]:
    """Where the host that holds ``count`` ranks from ``first`` on begins and ends in the job."""
    return [cut for cut in (first, first + count) if 0 < cut < world_size]


def first_cut(size: int, cuts: Sequence[int]) -> int | None:
    """A cut inside of one of the blocks of ``size`` neighbouring ranks that groups are made of.

    Args:
        size: tp, or cp * tp: in both orders of ranks these are neighbours.
        cuts: within the job, the first rank of each host but the first.
    """
    return next((cut for cut in cuts if cut % size), None)
