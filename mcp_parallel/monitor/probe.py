"""A look into one step of every ``monitor.health_every``: gradients, updates, activations, memory.

Each rank reads its own part; one sum over all ranks makes the figures of the whole model of them,
the same in every layout. A step that is due and updates nothing (loss scaling skipped it) passes
its turn to the next one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcp_kernels.spans import communication
from mcp_parallel.config import Config
from mcp_parallel.monitor.activations import NUM_FIGURES, Activations
from mcp_parallel.monitor.layers import Layers
from mcp_parallel.monitor.parameters import ParameterNorms
from mcp_parallel.monitor.rank_memory import StepMemory, peak_bytes
from mcp_parallel.optim.build import Optimizer
from mcp_parallel.parallel.mesh import Mesh
from mcp_parallel.parallel.parallelize import Stage

Figures = dict[str, float]
"""Layer -> figure."""


@dataclass(frozen=True)
class Health:
    """What all ranks know alike of one step; fields as in ``fields.FIELDS``."""

    grad_norm: Figures
    grad_norm_per_million: Figures
    weight_norm: Figures
    update_ratio: Figures
    activation_mean: Figures
    activation_variance: Figures
    dead_share: Figures
    memory_bytes: tuple[int, ...]
    step_memory_bytes: tuple[int, ...] | None

    @property
    def variance_growth(self) -> float | None:
        """The last block's variance over the first one's."""
        variances = list(self.activation_variance.values())
        if len(variances) < 2 or not variances[0] > 0:
            return None
        return variances[-1] / variances[0]

    def fields(self) -> dict[str, Any]:
        """As they stand in a record."""
        found: dict[str, Any] = {
            "grad_norm_by_layer": self.grad_norm,
            "grad_norm_per_million_by_layer": self.grad_norm_per_million,
            "weight_norm_by_layer": self.weight_norm,
            "update_ratio_by_layer": self.update_ratio,
            "activation_mean_by_layer": self.activation_mean,
            "activation_variance_by_layer": self.activation_variance,
            "variance_growth": self.variance_growth,
            "dead_share_by_layer": self.dead_share,
            "memory_bytes_by_rank": list(self.memory_bytes),
        }
        if self.step_memory_bytes is not None:
            found["step_memory_bytes_by_rank"] = list(self.step_memory_bytes)
        return {name: value for name, value in found.items() if value not in (None, {})}


class Probe:
    """Looks into the steps of one rank; ``begin`` and then ``before`` and ``after``, or ``skip``.

    Args:
        config: the run.
        stages: of this rank.
        optimizer: of their parameters.
        mesh: this rank's.
    """

    def __init__(
        self, config: Config, stages: Sequence[Stage], optimizer: Optimizer, mesh: Mesh
    ) -> None:
        self._config, self._stages, self._mesh = config, stages, mesh
        self._optimizer = optimizer
        self._every = config.monitor.health_every
        self._layers: Layers | None = None
        self._is_owed = False
        self._activations: Activations | None = None
        self._norms: ParameterNorms | None = None
        self._is_looking = False
        self._memory: StepMemory | None = None
        self._memory_is_known = mesh.device.type != "cpu" or not config.monitor.step_memory

    def begin(self, step: int) -> bool:
        """The step after ``step`` steps begins; True when it is looked into."""
        due = self._every > 0 and (self._is_owed or (step + 1) % self._every == 0)
        if not due:
            return False
        self._is_owed = True
        self._is_looking = True
        if self._norms is None:
            self._layers = Layers.of(self._config.model)
            shards = [shard for stage in self._stages for shard in stage.shards]
            self._norms = ParameterNorms(shards, self._optimizer, self._layers)
        if self._config.monitor.activations:
            self._activations = Activations(self._stages, self._mesh, self._config.model.num_layers)
        # Beside a profiler that runs already there can be no other.
        if not self._memory_is_known and not torch.autograd._profiler_enabled():
            self._memory = StepMemory()
            self._memory.start()
        return True

    def skip(self) -> None:
        """The step updates nothing."""
        if self._activations is not None:
            self._activations.remove()
        if self._memory is not None:
            self._memory.stop()
        self._activations = self._memory = None
        self._is_looking = False

    def before(self, scale: float) -> None:
        """Gradients are summed, parameters are about to move.

        Args:
            scale: of the loss.
        """
        if self._activations is not None:
            self._activations.remove()
        if self._is_looking and self._norms is not None:
            self._norms.before(scale)

    def after(self) -> Health | None:
        """Parameters have moved; what was seen, where this step was looked into. Collective."""
        if not self._is_looking:
            return None
        assert self._norms is not None
        assert self._layers is not None
        parts = [self._norms.after(), *self._own_memory()]
        if self._activations is not None:
            parts.append(self._activations.share())
        self._activations = self._memory = None
        self._is_looking = self._is_owed = False
        sums = self._summed(parts)
        return _health(self._layers, sums)

    def _own_memory(self) -> list[Tensor]:
        """Peak of this rank and of its step at its place, zero at all others'; float64 ``[W]``."""
        world = self._mesh.layout.world_size
        rank = dist.get_rank() if self._mesh.world is not None else 0
        figures = [float(peak_bytes(self._mesh.device))]
        if self._memory is not None:
            figures.append(float(self._memory.stop()))
            self._memory_is_known = True
        placed = torch.zeros(2, world, dtype=torch.float64)
        placed[: len(figures), rank] = torch.tensor(figures, dtype=torch.float64)
        return [placed]

    def _summed(self, parts: list[Tensor]) -> list[Tensor]:
        if self._mesh.world is None:
            return parts
        flat = torch.cat([part.reshape(-1) for part in parts]).to(self._mesh.device)
        with communication("sum of the health figures"):
            dist.all_reduce(flat, group=self._mesh.world)
        pieces = flat.cpu().split([part.numel() for part in parts])
        return [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)]


def _health(layers: Layers, sums: list[Tensor]) -> Health:
    squares, memory, *activations = sums
    gradients, weights, sampled, changes = squares.sqrt().tolist()
    norms = dict(zip(layers.names, gradients, strict=True))
    sizes = dict(zip(layers.names, layers.num_parameters, strict=True))
    ratios = zip(layers.names, changes, sampled, strict=True)
    peaks, steps = memory.tolist()
    figures = activations[0] if activations else torch.zeros(0, NUM_FIGURES, dtype=torch.float64)
    mean, variance, dead = _of_activations(layers.blocks, figures)
    return Health(
        grad_norm=norms,
        grad_norm_per_million={
            name: norm / math.sqrt(sizes[name] / 1e6) for name, norm in norms.items()
        },
        weight_norm=dict(zip(layers.names, weights, strict=True)),
        update_ratio={name: change / of if of else 0.0 for name, change, of in ratios},
        activation_mean=mean,
        activation_variance=variance,
        dead_share=dead,
        memory_bytes=tuple(int(figure) for figure in peaks),
        step_memory_bytes=tuple(int(figure) for figure in steps) if any(steps) else None,
    )


def _of_activations(names: tuple[str, ...], figures: Tensor) -> tuple[Figures, Figures, Figures]:
    """Mean, variance and share of dead units by block."""
    means: Figures = {}
    variances: Figures = {}
    dead: Figures = {}
    for name, (count, total, squares, num_dead, units) in zip(
        names, figures.tolist(), strict=bool(len(figures))
    ):
        means[name] = total / count
        variances[name] = max(0.0, squares / count - means[name] ** 2)
        dead[name] = num_dead / units
    return means, variances, dead
