"""Run one case and collect what is compared: losses, norms, every parameter's update."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mcp_parallel.checkpoint import step_name
from mcp_parallel.config import Config
from mcp_parallel.data.source import Data, documents_of, open_data, source_of
from mcp_parallel.model.loss import IGNORED
from mcp_parallel.optim.schedule import learning_rate
from mcp_parallel.parallel.mesh import Mesh, build_mesh, is_main
from mcp_parallel.parallel.parallelize import global_shapes
from mcp_parallel.parallel.precision import Precision
from mcp_parallel.parallel.shards import Shard
from mcp_parallel.parity.cases import STEPS, Case, preset_config
from mcp_parallel.snapshot import load_step, save_step
from mcp_parallel.step import TrainingStep


@dataclass(frozen=True)
class Measurement:
    """One case's run, on rank 0."""

    losses: list[float]
    grad_norms: list[float]
    loss_scales: list[float | None]
    updates: dict[str, Tensor]
    """Parameter name -> whole tensor of what these steps changed."""

    def followed_by(self, other: Measurement) -> Measurement:
        """The measurement of both, one after the other."""
        return Measurement(
            self.losses + other.losses,
            self.grad_norms + other.grad_norms,
            self.loss_scales + other.loss_scales,
            {name: update + other.updates[name] for name, update in self.updates.items()},
        )


class Meshes:
    """Meshes of one worker set, each set of process groups made once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[tuple[int | str, ...], Mesh | None] = {}

    def get(self, case: Case) -> Mesh | None:
        """This rank's mesh for the case, None where the case does not use the rank. Collective."""
        layout = case.layout
        degrees = (layout.pp, layout.dp, layout.cp, layout.tp, layout.dp_replicate)
        key = (*degrees, layout.rank_order)
        if key not in self._made:
            self._made[key] = build_mesh(layout, self._device)
        mesh = self._made[key]
        return None if mesh is None else replace(mesh, layout=layout)


def measure(
    case: Case, base: Config, data: Data, meshes: Meshes, precision: str, folder: Path
) -> Measurement | None:
    """Train the case for a few steps; collective over the worker set, a result on rank 0 alone.

    Args:
        case: what to train, in one leg or in two with a checkpoint between them.
        base: what the case varies.
        data: tokens of ``base``.
        meshes: of this rank.
        precision: number format.
        folder: takes the checkpoint; the same for all ranks.
    """
    total: Measurement | None = None
    run_dir = folder / f"{case.name} {precision}".replace(" ", "-")
    for leg, steps in case.legs():
        mesh = meshes.get(leg)
        if steps.start > 0 and dist.is_initialized():
            dist.barrier()  # a rank of this leg alone must not look for its checkpoint too early
        if mesh is None:
            continue
        part = _train(leg, steps, base, data, mesh, precision, run_dir)
        if is_main():
            total = part if total is None else total.followed_by(part)
    return total


def _train(
    case: Case,
    steps: range,
    base: Config,
    data: Data,
    mesh: Mesh,
    precision: str,
    run_dir: Path,
) -> Measurement:
    """Some steps of a run: from the checkpoint before them, and to the one after them."""
    config = case.configure(base, precision)
    step = TrainingStep(config, mesh)
    if steps.start > 0:
        load_step(run_dir / "checkpoints" / step_name(steps.start), step)
    own = case.variation.preset
    source = source_of(data if own is None else _data_of(own), config)
    before = {id(shard): shard.local.clone() for shard in step.shards}
    losses, norms, scales = [], [], []
    for index in steps:
        inputs, targets = source.batch(index, step.rows())
        if case.variation.padding:
            pad_rows(targets, step.rows())
        documents = documents_of(source, config, index, step.rows())
        result = step(
            torch.from_numpy(inputs),
            torch.from_numpy(targets),
            learning_rate(index, config.train),
            documents=None if documents is None else torch.from_numpy(documents),
            step=index,
        )
        losses.append(result.loss)
        norms.append(result.grad_norm)
        scales.append(result.loss_scale)
    if steps.stop < STEPS:
        save_step(run_dir, steps.stop, step)
    changes = [(shard, shard.local - before[id(shard)]) for shard in step.shards]
    updates = _gather(changes, global_shapes(config.model), Precision.of(config).state, mesh)
    return Measurement(losses, norms, scales, updates)


@cache
def _data_of(preset: str) -> Data:
    """What a preset of a case's own trains on, read once."""
    return open_data(preset_config(preset))


def pad_rows(targets: np.ndarray, rows: range) -> None:
    """Ignore the tail of each row in place; row r keeps a length that depends on r alone.

    Lengths run from a few tokens to all but a few, so data-parallel ranks and micro-batches hold
    very different numbers of valid tokens. Of rows with one target (images) every third is ignored.
    """
    if targets.ndim == 1:
        targets[[row % 3 == 0 for row in rows]] = IGNORED
        return
    length = targets.shape[1]
    for index, row in enumerate(rows):
        targets[index, 3 + (row * row * 17) % (length - 3) :] = IGNORED


def _gather(
    changes: list[tuple[Shard, Tensor]],
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    mesh: Mesh,
) -> dict[str, Tensor]:
    """Whole tensors from every rank's counted parts, by a sum over zeros elsewhere."""
    whole = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    for shard, change in changes:
        if shard.counted_here:
            target = whole[shard.name]
            for dim, (start, length) in enumerate(zip(shard.offsets, change.shape, strict=True)):
                target = target.narrow(dim, min(start, target.shape[dim]), length)
            target.copy_(change)
    if mesh.world is not None:
        flat = torch.cat([tensor.reshape(-1) for tensor in whole.values()])
        dist.all_reduce(flat, group=mesh.world)
        parts = flat.split([tensor.numel() for tensor in whole.values()])
        for tensor, part in zip(whole.values(), parts, strict=True):
            tensor.copy_(part.view_as(tensor))
    return whole
