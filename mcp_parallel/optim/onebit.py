"""1-bit Adam in the trainer: stage 1 is the trainer's AdamW, stage 2 sends signs over dp.

Gradients are sums here (losses are divided by the global number of tokens before backward), so what
dp ranks hold in stage 2 are terms of a sum. Data parallelism alone is compressed: sums over tp and
the two copies of a tied embedding stay in full precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcp_kernels.optim import OneBitAdam
from mcp_parallel.checkpoint.manifest import Manifest
from mcp_parallel.checkpoint.planning import LocalChunk
from mcp_parallel.config import TrainConfig
from mcp_parallel.optim.adamw import BETAS, EPS
from mcp_parallel.optim.clip import local_square_sum
from mcp_parallel.optim.onebit_checkpoint import OneBitCheckpoint
from mcp_parallel.optim.onebit_gradients import SwitchedGradients
from mcp_parallel.parallel.mesh import Mesh
from mcp_parallel.parallel.shards import Shard


class OneBit:
    """``OneBitAdam`` over the local part of every parameter; 1-D parameters don't decay.

    Args:
        shards: this rank's parameters, whole over dp.
        train: learning rate, decay, ``freeze_step`` (None: switch by the variance).
        mesh: the model's.
        gradients: whose sums over dp end with stage 1.
        zero: 1 shards the state over dp.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        train: TrainConfig,
        mesh: Mesh,
        gradients: SwitchedGradients,
        *,
        zero: int,
    ) -> None:
        self.mesh, self._gradients = mesh, gradients
        # A V has both copies of a tied embedding on its first rank: one is trained for the two.
        self._tied, self._copies = next(iter(gradients.tied), None), gradients.tied[1:]
        self.shards = [s for s in shards if not any(s is copy for copy in self._copies)]
        self.params = {shard.name: nn.Parameter(shard.local) for shard in self.shards}
        # One rank is a group too; None would be the world.
        group = mesh.data_group
        self.adam = OneBitAdam(
            self._groups(train),
            lr=train.lr,
            betas=BETAS,
            eps=EPS,
            freeze_step="auto" if train.freeze_step is None else train.freeze_step,
            group=group,
            skip_nonfinite=False,  # the step's own message finds what is not finite
            zero=zero,
            grads="averaged",
            op="sum",
        )
        self._counted = self._counted_over_tp(group)
        self._checkpoint = OneBitCheckpoint(self.adam, self.shards, mesh, zero)

    def _groups(self, train: TrainConfig) -> list[dict[str, Any]]:
        tied = self._tied
        groups: dict[tuple[bool, bool], list[tuple[str, nn.Parameter]]] = {}
        for shard in self.shards:
            key = len(shard.global_shape) > 1, shard is not tied
            groups.setdefault(key, []).append((shard.name, self.params[shard.name]))
        return [
            {
                "params": members,
                "weight_decay": train.weight_decay if decays else 0.0,
                "compress": compresses,
            }
            for (decays, compresses), members in sorted(groups.items(), reverse=True)
        ]

    def _counted_over_tp(self, group: dist.ProcessGroup | None) -> list[bool]:
        """What dp rank 0 counts in a norm: dp replicas of it are counted each in stage 2."""
        flags = torch.tensor([s.counted_here for s in self.shards], device=self.mesh.device)
        if group is not None and group.size() > 1:
            dist.broadcast(flags, dist.get_process_group_ranks(group)[0], group=group)
        return flags.tolist()

    def square_sum(self) -> Tensor:
        """This rank's share of the squared gradient norm, float64 ``[]``.

        Stage 2: the mean over dp ranks of the squared norm of what each would make of the whole
        gradient, dp times its own share; above the norm of the sum by the ranks' noise.
        """
        sums = [local_square_sum(shards) * weight for weight, shards in self.counted()]
        return torch.stack(sums).sum()

    def counted(self) -> list[tuple[float, list[Shard]]]:
        """See ``Optimizer.counted``; every shard here says ``counted_here``."""
        if not self.adam.is_compressing:
            return [(1.0, [shard for shard in self.shards if shard.counted_here])]
        tied = self._tied
        own = [s for s, counts in zip(self.shards, self._counted, strict=True) if counts]
        own = [replace(shard, counted_here=True) for shard in own if shard is not tied]
        groups = [(float(self.mesh.layout.dp_cp), own)]
        if tied is not None and tied.counted_here:
            groups.append((1.0, [tied]))
        return groups

    def ready_to_switch(self) -> bool:
        """This rank's vote for ending stage 1 with this step."""
        return self.adam.ready_to_switch()

    def step(self, lr: float, factor: float, *, switches: bool) -> None:
        """Update every local shard; collective over dp in stage 2.

        Args:
            lr: learning rate.
            factor: of the gradients, from clipping.
            switches: every rank voted for ending stage 1.
        """
        for group in self.adam.param_groups:
            group["lr"] = lr
        for shard in self.shards:
            self.params[shard.name].grad = shard.local_grad
        self.adam.apply(factor, switches)
        for param in self.params.values():
            param.grad = None  # the model's own gradients are freed by the model
        for copy in self._copies:
            assert self._tied is not None
            copy.local.copy_(self._tied.local)
        self._follow_stage()

    def _follow_stage(self) -> None:
        if self.adam.is_compressing:
            self._gradients.stop_summing()

    def wire_bytes(self) -> tuple[int, int] | None:
        """Bytes that this rank sent over dp in the last step, and what float32 would have taken."""
        report = self.adam.last_step
        return None if report is None else (report.bytes_sent, report.uncompressed_bytes)

    # --- checkpoints ----------------------------------------------------------------------------

    def chunks(self) -> list[LocalChunk]:
        """What a checkpoint holds of the state; collective over dp."""
        return self._checkpoint.chunks()

    def extra(self) -> dict[str, Any]:
        """What goes into the manifest; collective over the mesh."""
        return {"onebit": self._checkpoint.extra()}

    def chunks_to_load(self, manifest: Manifest) -> list[LocalChunk]:
        """Destinations for the state of a checkpoint."""
        return self._checkpoint.chunks_to_load(manifest)

    def loaded(self, manifest: Manifest) -> None:
        """Take over what the destinations now hold."""
        self._checkpoint.loaded(manifest)
        self._follow_stage()
