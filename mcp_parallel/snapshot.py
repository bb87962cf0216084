"""A training step's state as named rectangles: what checkpoints hold and how they come back."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from mcp_parallel.checkpoint.io import load, save
from mcp_parallel.checkpoint.manifest import Manifest
from mcp_parallel.checkpoint.planning import LocalChunk
from mcp_parallel.checkpoint.steps import prune
from mcp_parallel.parallel.mesh import is_main
from mcp_parallel.parallel.shards import publish
from mcp_parallel.step import TrainingStep


def model_chunks(step: TrainingStep) -> list[LocalChunk]:
    """This rank's parameters, each with its place in the whole.

    The tensors share memory with the model: loading into them loads the model.
    """
    return [
        LocalChunk(f"model.{shard.name}", shard.local, shard.global_shape, shard.offsets)
        for shard in step.shards
    ]


def save_step(run_dir: Path, step_number: int, step: TrainingStep) -> Path:
    """Write ``checkpoints/step_XXXXXXXX`` after ``step_number`` updates; collective.

    The data position needs no state of its own: order is a function of ``data.seed`` and the
    global sample position, which is ``step_number`` times the global batch.
    """
    config = step.config
    checkpoints = run_dir / "checkpoints"
    path = save(
        checkpoints,
        [*model_chunks(step), *step.optimizer.chunks()],
        step=step_number,
        fingerprint=config.fingerprint(),
        layout=asdict(step.mesh.layout),
        extra={
            "config": config.to_mapping(),
            "sample_position": step_number * config.train.global_batch_size,
            **step.optimizer.extra(),
            **step.scaler.extra(),
        },
        group=step.mesh.world,
    )
    if is_main():
        prune(checkpoints, config.checkpoint.keep)
    return path


def load_step(path: Path, step: TrainingStep) -> int:
    """Fill ``step`` from a checkpoint of any layout; collective. Returns the updates it holds."""
    manifest = load(
        path,
        [*model_chunks(step), *step.optimizer.chunks_to_load(Manifest.read(path))],
        fingerprint=step.config.fingerprint(),
        group=step.mesh.world,
    )
    step.optimizer.loaded(manifest)
    step.scaler.load(manifest.extra)
    publish(step.shards)
    return manifest.step
