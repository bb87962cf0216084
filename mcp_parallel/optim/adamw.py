"""AdamW on each rank's local shards (Loshchilov and Hutter, 2019).

The update is element by element, so a rank updates what it holds with ``torch.optim.AdamW`` and
its fused kernel, without DTensor dispatch; the moments have the shards' shapes and places.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcp_kernels.optim._fused_adamw import fused_adamw_
from mcp_parallel.checkpoint.format import CheckpointError
from mcp_parallel.checkpoint.manifest import Manifest
from mcp_parallel.checkpoint.planning import LocalChunk
from mcp_parallel.config import TrainConfig
from mcp_parallel.optim.clip import local_square_sum
from mcp_parallel.optim.lower_tier import LowerTier, parts
from mcp_parallel.optim.scaler import updates_in
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


@dataclass(frozen=True)
class _State:
    """One parameter's local values, and its moments wherever they are."""

    shard: Shard
    local: Tensor
    moments: dict[str, Tensor]


class AdamW:
    """``torch.optim.AdamW`` over the local part of every parameter; 1-D parameters don't decay.

    Clipping is part of the update: gradients are scaled as they are read, in one pass.

    Args:
        shards: this rank's parameters.
        train: learning rate and decay.
        tier: where the moments live; None is beside the parameters.
    """

    def __init__(
        self, shards: Sequence[Shard], train: TrainConfig, tier: LowerTier | None = None
    ) -> None:
        self.shards = list(shards)
        self._states = [
            _State(shard, local, {moment: _zeros(local, tier) for moment in MOMENTS})
            for shard in self.shards
            for local in [shard.local]
        ]
        self._groups = [
            (train.weight_decay, [s for s in self._states if len(s.shard.global_shape) > 1]),
            (0.0, [s for s in self._states if len(s.shard.global_shape) <= 1]),
        ]
        device = self.shards[0].parameter.device if self.shards else None
        self._count = torch.zeros((), dtype=torch.float32, device=device)
        self._is_far = tier is not None and tier.is_far

    def square_sum(self) -> Tensor:
        """This rank's share of the squared gradient norm, float64 ``[]``."""
        return local_square_sum(self.shards)

    def counted(self) -> list[tuple[float, list[Shard]]]:
        """See ``Optimizer.counted``."""
        return [(1.0, [shard for shard in self.shards if shard.counted_here])]

    def ready_to_switch(self) -> bool:
        """There is nothing to switch to."""
        return False

    @torch.no_grad()
    def step(self, lr: float, factor: float = 1.0, *, switches: bool = False) -> None:
        """Update every local shard from its local gradient.

        Args:
            lr: learning rate.
            factor: of the gradients, from clipping; they are scaled in place.
            switches: unused.
        """
        self._count.add_(1)
        for weight_decay, group in self._groups:
            present = [(s, grad) for s in group if (grad := s.shard.local_grad) is not None]
            for part in self._parts([s.local for s, _ in present]):
                self._update(present[part.start : part.stop], lr, weight_decay, factor)

    def _parts(self, locals_: list[Tensor]) -> Iterable[range]:
        """All at once; where moments come from elsewhere, what fits beside the model."""
        return parts(locals_) if self._is_far else ([range(len(locals_))] if locals_ else [])

    def _update(
        self,
        part: Sequence[tuple[_State, Tensor]],
        lr: float,
        weight_decay: float,
        factor: float,
    ) -> None:
        first, second = (
            [
                s.moments[moment].to(s.local.device, non_blocking=True)
                if self._is_far
                else s.moments[moment]
                for s, _ in part
            ]
            for moment in MOMENTS
        )
        fused_adamw_(
            [s.local for s, _ in part],
            [grad for _, grad in part],
            (first, second),
            [self._count] * len(part),
            lr=lr,
            betas=BETAS,
            weight_decay=weight_decay,
            eps=EPS,
            factor=factor,
        )
        if self._is_far:
            for moment, tensors in zip(MOMENTS, (first, second), strict=True):
                for (state, _), tensor in zip(part, tensors, strict=True):
                    state.moments[moment].copy_(tensor, non_blocking=True)

    def moments(self) -> Iterator[tuple[str, Shard, Tensor]]:
        """(moment name, shard it belongs to, local values), in a fixed order."""
        for state in self._states:
            for moment in MOMENTS:
                yield moment, state.shard, state.moments[moment]

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
        self.set_step_count(updates_in(manifest))

    def set_step_count(self, count: int) -> None:
        """Say how many updates the moments hold; the bias correction depends on it."""
        self._count.fill_(count)
