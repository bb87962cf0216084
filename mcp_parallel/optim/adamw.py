"""AdamW on each rank's local shards (Loshchilov and Hutter, 2019).

The update is element by element, so a rank updates what it holds with ``torch.optim.AdamW`` and
its fused kernel, without DTensor dispatch; the moments have the shards' shapes and places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mcp_parallel.config import TrainConfig
from mcp_parallel.parallel.shards import Shard

BETAS = (0.9, 0.95)
EPS = 1e-8
MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """``torch.optim.AdamW`` over the local part of every parameter; 1-D parameters don't decay."""

    def __init__(self, shards: Sequence[Shard], train: TrainConfig) -> None:
        self.shards = list(shards)
        self._locals = [shard.local for shard in self.shards]
        decay, plain = [], []
        for shard, local in zip(self.shards, self._locals, strict=True):
            (decay if len(shard.global_shape) > 1 else plain).append(local)
        groups = [
            {"params": decay, "weight_decay": train.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=train.lr,
            betas=BETAS,
            eps=EPS,
            fused=True,
        )
        for local in self._locals:
            self._adamw.state[local] = {
                "step": torch.zeros((), dtype=torch.float32, device=local.device),
                **{moment: torch.zeros_like(local) for moment in MOMENTS},
            }

    def step(self, lr: float) -> None:
        """Update every local shard from its local gradient with learning rate ``lr``."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        for shard, local in zip(self.shards, self._locals, strict=True):
            local.grad = shard.local_grad
        self._adamw.step()

    def moments(self) -> Iterator[tuple[str, Shard, Tensor]]:
        """(moment name, shard it belongs to, local values), in a fixed order."""
        for shard, local in zip(self.shards, self._locals, strict=True):
            for moment in MOMENTS:
                yield moment, shard, self._adamw.state[local][moment]

    def set_step_count(self, count: int) -> None:
        """Say how many updates the moments hold; the bias correction depends on it."""
        for local in self._locals:
            self._adamw.state[local]["step"].fill_(count)
