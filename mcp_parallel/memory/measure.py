"""The tracked peak of each rank of a short run, beside which an estimate is held."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mcp_parallel.config import Config, ModelConfig
from mcp_parallel.launch.local import launch_local
from mcp_parallel.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor

    from mcp_parallel.launch.context import RankContext

# Once here rather than in every rank.
_PRELOAD = (
    "mcp_kernels.shm",
    "mcp_parallel.memory.track",
    "mcp_parallel.step",
    "torch._dynamo",
    "torch.distributed.pipelining",
)


def measure_peaks(config: Config, *, steps: int = 2) -> list[int]:
    """Train on random tokens or pixels on CPU ranks of this machine and track what each allocates.

    Ranks talk through shared memory (backend ``shm``), where every message is done when its call
    returns: a backend with threads of its own frees memory where no tracker sees it.

    Args:
        config: checked; of a layout that fits this machine.
        steps: optimizer steps; the second is the first that has gradients to forget.

    Returns:
        The peak of each rank, bytes.

    Raises:
        RuntimeError: a rank failed; its error is on stderr.
    """
    with tempfile.TemporaryDirectory() as folder:

        def entry(context: RankContext) -> int:
            peak = _track(config, context, steps, Path(folder) / "scratch")
            (Path(folder) / str(context.rank)).write_text(json.dumps(peak), encoding="ascii")
            return 0

        world_size = Layout.from_config(config.parallel).world_size
        if launch_local(entry, world_size, backend="shm", preload=_PRELOAD) != 0:
            raise RuntimeError("measure_peaks: every rank must finish, got a failure (see stderr)")
        return [
            json.loads((Path(folder) / str(rank)).read_text(encoding="ascii"))
            for rank in range(world_size)
        ]


def _track(config: Config, context: RankContext, steps: int, scratch: Path) -> int:
    import torch

    from mcp_parallel.memory.track import AllocationTracker
    from mcp_parallel.parallel.mesh import build_mesh
    from mcp_parallel.step import TrainingStep

    torch.set_num_threads(1)
    layout = Layout.from_config(config.parallel)
    mesh = build_mesh(layout, context.device)
    assert mesh is not None
    config = replace(config, train=replace(config.train, steps=steps))
    with AllocationTracker() as tracker:
        step = TrainingStep(config, mesh, scratch)
        for index in range(steps):
            inputs, targets = _batch(config.model, len(step.rows()), index)
            step(inputs, targets, config.train.lr)
            del inputs, targets
        del step
    return tracker.peak_bytes


def _batch(model: ModelConfig, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    import torch

    from mcp_parallel.model.family import family_of

    generator = torch.Generator().manual_seed(seed)
    family = family_of(model)
    shape = rows, *family.input_shape(model, model.seq_len)
    if family.input_dtype == torch.int64:
        tokens = torch.randint(model.vocab_size, shape, generator=generator)
        return tokens, tokens
    targets = rows, *family.output_shape(model, model.seq_len)[:-1]
    pixels = torch.randn(shape, dtype=family.input_dtype, generator=generator)
    return pixels, torch.randint(model.vocab_size, targets, generator=generator)
