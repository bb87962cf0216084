"""What a micro-batch takes in each part of the model, timed on this rank as the run would do it.

Three stages of one block are built, as a pipeline's first, middle and last are, and run in turns.
What the first takes more than the middle one is the embedding, and likewise the head with its loss:
so costs that stages share (messages, hooks, the loop) are in the block, where they are met.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor

from mcp_parallel.config import Config
from mcp_parallel.model.family import family_of
from mcp_parallel.parallel.head_loss import build_stage_loss
from mcp_parallel.parallel.mesh import Mesh
from mcp_parallel.parallel.parallelize import Stage, build_stages
from mcp_parallel.parallel.pipeline import hidden_like
from mcp_parallel.planner.balance import LayerCosts

# The first passes allocate. What disturbs a pass makes it longer: the lower quartile is taken.
_WARM_UP, _ROUNDS = 2, 9


def measure_layers(config: Config, mesh: Mesh, rounds: int = _ROUNDS) -> LayerCosts:
    """Seconds of one micro-batch, forward and backward. Collective over each tp and cp group.

    Args:
        config: the run, checked.
        mesh: this rank's, of the run's layout.
        rounds: timed passes, whose lower quartile counts.

    Cost: ``rounds`` + 2 micro-batches through three blocks, embedding and head; while it runs their
    weights, gradients and one micro-batch's activations are in memory.
    """
    stages, stage_mesh = _three_stages(config, mesh)
    passes = _Passes(config, mesh, stages, stage_mesh)
    times: list[list[float]] = [[] for _ in stages]
    for turn in range(_WARM_UP + rounds):
        for stage, found in zip(stages, times, strict=True):
            seconds = passes.time(stage)
            if turn >= _WARM_UP:
                found.append(seconds)
    first, middle, last = (sorted(found)[rounds // 4] for found in times)
    return LayerCosts(
        embedding=max(0.0, first - middle), block=middle, head=max(0.0, last - middle)
    )


def _three_stages(config: Config, mesh: Mesh) -> tuple[list[Stage], Mesh]:
    """Stages of one block on this rank alone, cut over its tp and cp groups as in the run."""
    alone = {"pp": 1, "dp": 1, "zero": 0, "dp_replicate": 1, "virtual_stages": 3}
    parallel = replace(
        config.parallel, **alone, schedule="1f1b", stage_split="count", dp_shares=None
    )
    stage_mesh = replace(
        mesh,
        layout=replace(mesh.layout, **alone, schedule="1f1b"),
        coordinate=replace(mesh.coordinate, pp=0, dp=0),
    )
    model = replace(config.model, num_layers=3)
    return build_stages(replace(config, model=model, parallel=parallel), stage_mesh), stage_mesh


class _Passes:
    """Forward and backward of each of the three stages."""

    def __init__(self, config: Config, mesh: Mesh, stages: list[Stage], stage_mesh: Mesh) -> None:
        model, rows, family = config.model, config.train.micro_batch_size, family_of(config.model)
        length = model.seq_len // mesh.layout.cp
        self._device = mesh.device
        shape = (rows, *family.input_shape(model, length))
        if family.input_dtype == torch.int64:
            self._inputs = torch.arange(shape[0] * shape[1]).view(shape) % model.vocab_size
        else:
            self._inputs = torch.ones(shape, dtype=family.input_dtype)
        self._inputs = self._inputs.to(mesh.device)
        *each, _ = family.output_shape(model, length)
        self._targets = torch.zeros(rows, *each, dtype=torch.int64, device=mesh.device)
        self._hidden = torch.full_like(hidden_like(config, stage_mesh), 0.5, device=mesh.device)
        for stage in stages:
            if stage.model.mixture is not None:
                stage.model.mixture.fp32_share = 0.0  # as in all but the first steps
        # With the run's own schedule: GPipe's head keeps less and computes more.
        self._loss = build_stage_loss(stages, config, mesh)

    def time(self, stage: Stage) -> float:
        """Seconds of one pass through ``stage``."""
        start = self._now()
        x = self._inputs if stage.is_first else self._hidden.clone().requires_grad_()
        out = stage.model(x)
        if stage.is_last:
            self._loss(out, self._targets, 1.0).backward()
        else:
            out.backward(self._gradient(out))
        return self._now() - start

    def _gradient(self, out: Tensor) -> Tensor:
        return self._hidden.view_as(out)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
