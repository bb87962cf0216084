"""One training step, the same in every layout: forward, backward, sums, clip, update."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mcp_kernels.spans import communication, span
from mcp_parallel.config import Config
from mcp_parallel.division import is_settled, rows_of
from mcp_parallel.model.loss import IGNORED
from mcp_parallel.monitor.probe import Health, Probe
from mcp_parallel.monitor.work_clock import WorkClock
from mcp_parallel.optim.build import build_optimizer, model_mesh_of
from mcp_parallel.optim.clip import clip_factor
from mcp_parallel.optim.lower_tier import LowerTier
from mcp_parallel.optim.scaler import LossScaler
from mcp_parallel.parallel.clock import Occupation, bubbles
from mcp_parallel.parallel.context import own_part, split_of
from mcp_parallel.parallel.execute import build_executor
from mcp_parallel.parallel.head_loss import build_stage_loss
from mcp_parallel.parallel.mesh import DATA, Mesh
from mcp_parallel.parallel.parallelize import build_stages
from mcp_parallel.parallel.precision import fp32_share
from mcp_parallel.parallel.shards import publish


@dataclass(frozen=True)
class StepResult:
    """What all ranks know alike after a step."""

    loss: float
    """Mean loss over the valid tokens of the global batch, nats a token, before the update."""
    grad_norm: float
    """Norm of the global gradient before clipping; after 1-bit Adam's switch, root mean square over
    dp ranks of what each alone takes for it."""
    num_tokens: int
    """Valid tokens in the global batch."""
    stop_requested: bool
    """Some rank was asked to stop."""
    is_unread: bool = False
    """Some rank could not read its rows: nothing was updated."""
    wire_bytes: int | None = None
    """Bytes that rank 0 sent over dp to average, where the optimizer counts them."""
    uncompressed_bytes: int | None = None
    """What a bandwidth-optimal float32 all-reduce sends for the same."""
    bubbles: tuple[float, ...] | None = None
    """Idle fraction of each pipeline rank, 0 to 1 (see ``parallel.clock.bubbles``), times being
    means over its dp, cp and tp ranks; None without a pipeline."""

    loss_scale: float | None = None
    """What the loss was multiplied with for backward, where loss scaling is on."""
    skipped: bool = False
    """Gradients overflowed at this loss scale: nothing was updated, and the scale was lowered."""
    own_s: tuple[float, ...] | None = None
    """Seconds of each rank's own work up to the sum of the totals (see ``monitor.work_clock``);
    None while nobody measures."""
    health: Health | None = None
    """Of a step that was looked into."""

    @property
    def is_finite(self) -> bool:
        """False when the loss or the gradient is NaN or infinite; then nothing was updated."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class TrainingStep:
    """The model of one rank and everything that a step does to it.

    Args:
        config: the run, checked and settled (``mcp_parallel.settle``).
        mesh: this rank's.
        scratch: a folder on disk for what ``memory.offload`` moves out of a CPU's memory; None is
            the machine's folder for temporary files.
    """

    def __init__(self, config: Config, mesh: Mesh, scratch: Path | None = None) -> None:
        assert is_settled(config), "all ranks have to have the same numbers by now"
        self.config = config
        self.mesh = mesh
        model_mesh = model_mesh_of(config.train, mesh)
        tier = LowerTier(mesh.device, scratch) if config.memory.offload else None
        self.stages = build_stages(config, model_mesh, tier)
        self.shards = [shard for stage in self.stages for shard in stage.shards]
        self.gradients, self.optimizer = build_optimizer(
            config.train,
            self.stages,
            self.shards,
            model_mesh,
            zero=mesh.layout.zero,
            tier=tier,
        )
        self._stage_loss = build_stage_loss(self.stages, config, model_mesh)
        self.executor = build_executor(self.stages, config, model_mesh, self.gradients, self._loss)
        self._tokens = _TokenCount(mesh)
        self._split = split_of(config, mesh)
        self.scaler = LossScaler(config)
        self.work = WorkClock(mesh)
        self.probe = Probe(config, self.stages, self.optimizer, mesh)

    def rows(self) -> range:
        """The rows of the global batch that this rank's data-parallel replica trains on."""
        return rows_of(self.config, self.mesh.coordinate.dp)

    def own_part(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Of this replica's rows what this rank works on (see ``context.own_part``)."""
        return own_part(self._split, inputs, targets)

    def __call__(
        self,
        inputs: Tensor,
        targets: Tensor,
        lr: float,
        *,
        documents: Tensor | None = None,
        step: int = 0,
        stop: bool = False,
        unread: bool = False,
    ) -> StepResult:
        """Train on one global batch; collective over the mesh.

        Args:
            inputs: this replica's rows, int64 ``[rows, S]``.
            targets: next tokens, int64 ``[rows, S]``, ``IGNORED`` where there is none.
            lr: learning rate of this update.
            documents: int64 ``[rows, S]``, where the document of each position begins; given, no
                position sees another document's.
            step: steps done before, skipped ones included; says how the embedding is computed.
            stop: this rank was asked to stop; every rank learns of it in the result.
            unread: what this rank was given stands for rows that it could not read; likewise.
        """
        self.probe.begin(step)
        loss = self.accumulate(inputs, targets, documents=documents, step=step)
        with span("totals"):
            result, switches = self._totals(loss, stop, unread)
        if result.is_unread:
            self.probe.skip()
            return result
        scale = self.scaler.scale
        skipped = self.scaler.update(overflowed=not result.is_finite)
        if self.scaler.is_on:
            result = replace(result, loss_scale=scale, skipped=skipped)
        if not result.is_finite:
            self.probe.skip()
            return result
        self.probe.before(scale)
        factor = clip_factor(result.grad_norm, self.config.train.clip_norm) / scale
        with span("optimizer"):
            self.optimizer.step(lr, factor, switches=switches)
            publish(self.shards)
        result = replace(result, health=self.probe.after())
        sent = self.optimizer.wire_bytes()
        if sent is None:
            return result
        return replace(result, wire_bytes=sent[0], uncompressed_bytes=sent[1])

    def accumulate(
        self, inputs: Tensor, targets: Tensor, *, documents: Tensor | None = None, step: int = 0
    ) -> Tensor:
        """Forward and backward of one global batch; arguments as for a step.

        Gradients are those of all ranks after it, times the loss scale.

        Returns:
            What this rank computed of the loss, times the loss scale, ``[]``.
        """
        inputs, targets = self.own_part(inputs, targets)
        self._tokens.start((targets != IGNORED).sum())
        for stage in self.stages:
            if stage.model.mixture is not None:
                stage.model.mixture.fp32_share = fp32_share(step, self.config.train)
        self.gradients.zero()
        loss = self.executor.run(inputs, targets, documents)
        self.gradients.finish()
        return loss

    def _loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """A micro-batch's share of the mean over the global batch's valid tokens.

        Dividing before backward by the global count is what makes gradients plain sums in every
        layout, unequal padding included. The loss scale multiplies it here, in the last stage.
        """
        return self._stage_loss(output, targets, self.scaler.scale / self._tokens.total())

    def _totals(self, loss: Tensor, stop: bool, unread: bool) -> tuple[StepResult, bool]:
        """Squared norm, loss, flags and votes of all ranks, in one message.

        The second result says that every rank's optimizer is ready for its next stage.
        """
        # Each tp rank of a last stage computed the same loss; one of them counts.
        loss_here = loss if self.stages[-1].is_last and self.mesh.coordinate.tp == 0 else 0 * loss
        occupation = self.executor.occupation
        own_s = self.work.own_s_by_rank(0.0 if occupation is None else occupation.unseen_s)
        votes = [stop, unread, not self.optimizer.ready_to_switch()]
        flags = [*votes, *own_s, *self._occupation()]
        norm_and_loss = torch.stack([self.optimizer.square_sum(), loss_here.double().cpu()])
        sums = torch.cat([norm_and_loss, torch.tensor(flags, dtype=torch.float64)])
        if self.mesh.world is not None:
            sums = sums.to(self.mesh.device)
            with communication("sum of the totals"):
                dist.all_reduce(sums, group=self.mesh.world)
        square_sum, total_loss, stops, unreads, not_ready, *times = sums.tolist()
        own_s, times = times[: len(own_s)], times[len(own_s) :]
        norm = math.sqrt(square_sum) if square_sum >= 0 else math.nan
        scale = self.scaler.scale
        num_tokens = self._tokens.total()
        result = StepResult(total_loss / scale, norm / scale, num_tokens, stops > 0, unreads > 0)
        if own_s:
            result = replace(result, own_s=tuple(own_s))
        if times:
            pairs = zip(times[::2], times[1::2], strict=True)
            result = replace(result, bubbles=bubbles([Occupation(*pair) for pair in pairs]))
        return result, not_ready == 0

    def _occupation(self) -> list[float]:
        """Busy and wall seconds of each pipeline rank, zero for other ranks' and one mean each."""
        occupation, layout = self.executor.occupation, self.mesh.layout
        if occupation is None:
            return []
        times = [0.0] * (2 * layout.pp)
        at, replicas = 2 * self.mesh.coordinate.pp, layout.dp_cp * layout.tp
        times[at : at + 2] = [occupation.busy_s / replicas, occupation.wall_s / replicas]
        return times


class _TokenCount:
    """Valid tokens of the global batch; the sum over dp and cp travels while the forward runs."""

    def __init__(self, mesh: Mesh) -> None:
        self._group = mesh.group(DATA)
        self._device = mesh.device
        self._count = torch.zeros((), dtype=torch.int64)
        self._work: dist.Work | None = None
        self._total: int | None = None

    def start(self, local: Tensor) -> None:
        self._total = None
        self._count = local.to(self._device)
        if self._group is not None:
            self._work = dist.all_reduce(self._count, group=self._group, async_op=True)

    def total(self) -> int:
        if self._total is None:
            if self._work is not None:
                with communication("wait for the token count"):
                    self._work.wait()
            self._total = max(1, int(self._count.item()))
        return self._total
