"""AdamW on each rank's local shards (Loshchilov and Hutter, 2019).

The update is element by element, so a rank updates what it holds with ``torch.optim.AdamW`` and
its fused kernel, without DTensor dispatch; the moments have the shards' shapes and places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from mcp_parallel.checkpoint.format import CheckpointError
from mcp_parallel.checkpoint.manifest import Manifest
from mcp_parallel.checkpoint.planning import LocalChunk
from mcp_parallel.config import TrainConfig
from mcp_parallel.optim.clip import local_square_sum, scale_gradients
from mcp_parallel.optim.lower_tier import LowerTier, parts
from mcp_parallel.parallel.shards import Shard

BETAS = (0.9, 0.95)
EPS = 1e-8
MOMENTS = ("exp_avg", "exp_avg_sq")


def refuse_codes(extra: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that AdamW cannot go on from.

    Raises:
        CheckpointError: it is of 1-bit Adam after its switch.
    """
    switch_step = (extra.get("onebit") or {}).get("switch_step")
    if switch_step is not None:
        raise CheckpointError(
            "load: train.optimizer must be onebit_adam for a checkpoint after the switch of 1-bit "
            f"Adam (step {switch_step}), got adamw; its second moment is frozen: resume with "
            "onebit_adam, or from a checkpoint before the switch"
        )


def _zeros(like: Tensor, tier: LowerTier | None) -> Tensor:
    return torch.zeros_like(like) if tier is None else tier.zeros_like(like)


class AdamW:
    """``torch.optim.AdamW`` over the local part of every parameter; 1-D parameters don't decay.

    Args:
        shards: this rank's parameters.
        train: learning rate and decay.
        tier: where the moments live; None is beside the parameters.
    """

    def __init__(
        self, shards: Sequence[Shard], train: TrainConfig, tier: LowerTier | None = None
    ) -> None:
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
                **{moment: _zeros(local, tier) for moment in MOMENTS},
            }
        self._is_far = tier is not None and tier.is_far

    def square_sum(self) -> Tensor:
        """This rank's share of the squared gradient norm, float64 ``[]``."""
        return local_square_sum(self.shards)

    def ready_to_switch(self) -> bool:
        """There is nothing to switch to."""
        return False

    def step(self, lr: float, factor: float = 1.0, *, switches: bool = False) -> None:
        """Update every local shard from its local gradient.

        Args:
            lr: learning rate.
            factor: of the gradients, from clipping; they are scaled in place.
            switches: unused.
        """
        scale_gradients(self.shards, factor)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        for shard, local in zip(self.shards, self._locals, strict=True):
            local.grad = shard.local_grad
        if self._is_far:
            self._step_by_parts()
        else:
            self._adamw.step()

    def _step_by_parts(self) -> None:
        """``torch.optim.AdamW``'s update of moments that are elsewhere, some at a time."""
        for group in self._adamw.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for part in parts(params):
                here = [params[index] for index in part]
                states = [self._adamw.state[p] for p in here]
                first, second = (
                    [
                        s[moment].to(p.device, non_blocking=True)
                        for p, s in zip(here, states, strict=True)
                    ]
                    for moment in MOMENTS
                )
                adamw(
                    here,
                    [p.grad for p in here],
                    first,
                    second,
                    [],
                    [s["step"] for s in states],
                    fused=True,
                    amsgrad=False,
                    beta1=BETAS[0],
                    beta2=BETAS[1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=EPS,
                    maximize=False,
                )
                for moment, tensors in zip(MOMENTS, (first, second), strict=True):
                    for state, tensor in zip(states, tensors, strict=True):
                        state[moment].copy_(tensor, non_blocking=True)

    def moments(self) -> Iterator[tuple[str, Shard, Tensor]]:
        """(moment name, shard it belongs to, local values), in a fixed order."""
        for shard, local in zip(self.shards, self._locals, strict=True):
            for moment in MOMENTS:
                yield moment, shard, self._adamw.state[local][moment]

    def wire_bytes(self) -> tuple[int, int] | None:
        """Nothing is compressed, so nothing is reported."""
        return None

    def chunks(self) -> list[LocalChunk]:
        """What a checkpoint holds of the state; loading into it loads the state."""
        return [
            LocalChunk(f"optim.{moment}.{shard.name}", values, shard.global_shape, shard.offsets)
            for moment, shard, values in self.moments()
        ]

    def extra(self) -> dict[str, Any]:
        """Nothing goes into the manifest."""
        return {}

    def chunks_to_load(self, manifest: Manifest) -> list[LocalChunk]:
        """Destinations for the state of a checkpoint."""
        refuse_codes(manifest.extra)
        return self.chunks()

    def loaded(self, manifest: Manifest) -> None:
        """Take over what the destinations now hold."""
        self.set_step_count(manifest.step)

    def set_step_count(self, count: int) -> None:
        """Say how many updates the moments hold; the bias correction depends on it."""
        for local in self._locals:
            self._adamw.state[local]["step"].fill_(count)
