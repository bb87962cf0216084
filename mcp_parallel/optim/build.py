"""Which optimizer a run has, with the gradient sums that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from mcp_parallel.checkpoint.manifest import Manifest
from mcp_parallel.checkpoint.planning import LocalChunk
from mcp_parallel.config import TrainConfig
from mcp_parallel.optim.adamw import AdamW
from mcp_parallel.optim.lower_tier import LowerTier
from mcp_parallel.optim.onebit import OneBit
from mcp_parallel.optim.onebit_gradients import SwitchedGradients
from mcp_parallel.parallel.gradients import Gradients
from mcp_parallel.parallel.mesh import Mesh
from mcp_parallel.parallel.parallelize import Stage
from mcp_parallel.parallel.shards import Shard


class Optimizer(Protocol):
    """What a training step asks of its optimizer."""

    def square_sum(self) -> Tensor:
        """This rank's share of the squared gradient norm, float64 ``[]``."""
        ...

    def counted(self) -> list[tuple[float, list[Shard]]]:
        """Weights, and shards whose local gradients' squares count so much in ``square_sum``."""
        ...

    def ready_to_switch(self) -> bool:
        """This rank's vote for ending the first stage with this step."""
        ...

    def step(self, lr: float, factor: float, *, switches: bool) -> None:
        """Update from gradients times ``factor``; ``switches``: every rank voted so."""
        ...

    def wire_bytes(self) -> tuple[int, int] | None:
        """(sent over dp by this rank, what float32 takes) in the last step; None: not counted."""
        ...

    def chunks(self) -> list[LocalChunk]:
        """What a checkpoint holds of the state; collective."""
        ...

    def extra(self) -> dict[str, Any]:
        """What goes into a checkpoint's manifest; collective, equal on all ranks."""
        ...

    def chunks_to_load(self, manifest: Manifest) -> list[LocalChunk]:
        """Destinations for the state of a checkpoint."""
        ...

    def loaded(self, manifest: Manifest) -> None:
        """Take over what the destinations now hold."""
        ...


def model_mesh_of(train: TrainConfig, mesh: Mesh) -> Mesh:
    """The mesh to build the model on.

    1-bit Adam shards its state itself (ZeRO-1) and needs parameters whole over dp, so
    ``fully_shard`` has nothing to do then.
    """
    if train.optimizer == "adamw":
        return mesh
    return replace(mesh, layout=replace(mesh.layout, zero=0))


def build_optimizer(
    train: TrainConfig,
    stages: Sequence[Stage],
    shards: Sequence[Shard],
    mesh: Mesh,
    *,
    zero: int,
    tier: LowerTier | None = None,
) -> tuple[Gradients, Optimizer]:
    """Gradient sums and optimizer of this rank's stages, built on ``mesh``; collective over it.

    Args:
        train: names the optimizer.
        stages: of this rank.
        shards: all of theirs.
        mesh: as ``model_mesh_of`` gave it.
        zero: configured stage of ZeRO.
        tier: where AdamW's moments live; None is beside the parameters.
    """
    if train.optimizer == "adamw":
        return Gradients(stages, mesh), AdamW(shards, train, tier)
    gradients = SwitchedGradients(stages, mesh)
    return gradients, OneBit(shards, train, mesh, gradients, zero=zero)
