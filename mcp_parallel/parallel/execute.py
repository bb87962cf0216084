"""Forward and backward of one step's micro-batches, by a loop or by a pipeline schedule.

Both accumulate gradients into the parameters and return the sum of the micro-batch losses that
this rank computed (zero where the last stage is elsewhere).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import Schedule1F1B

from mcp_parallel.config import Config
from mcp_parallel.layout import split_dim
from mcp_parallel.parallel.gradients import Gradients
from mcp_parallel.parallel.mesh import Mesh
from mcp_parallel.parallel.parallelize import DTYPES, Stage

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(logits ``[b, S, V]``, targets ``[b, S]``) -> this micro-batch's share of the step's loss."""


class Executor(Protocol):
    """Runs forward and backward for a rank's rows of the global batch."""

    def run(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """``inputs`` and ``targets`` int64 ``[rows, S]``; returns the summed loss, detached, []."""
        ...


class MicrobatchLoop:
    """One stage: micro-batches one after the other, gradients sent during the last backward."""

    def __init__(
        self, stage: Stage, config: Config, mesh: Mesh, gradients: Gradients, loss: LossFunction
    ) -> None:
        self.model = stage.model
        self.rows = config.train.micro_batch_size
        self.zero = mesh.layout.zero
        self.gradients = gradients
        self.loss = loss

    def run(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """See ``Executor.run``."""
        total: Tensor | None = None
        pairs = list(zip(inputs.split(self.rows), targets.split(self.rows), strict=True))
        for index, (x, y) in enumerate(pairs):
            is_last = index == len(pairs) - 1
            self._set_zero_stage(is_last)
            if is_last:
                self.gradients.before_last_backward()
            loss = self.loss(self.model(x), y)
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total

    def _set_zero_stage(self, is_last: bool) -> None:
        """ZeRO 1 sums gradients on the last micro-batch only, 2 and 3 on each; 3 frees weights."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(is_last or self.zero >= 2)
            self.model.set_reshard_after_backward(is_last or self.zero == 3)
            self.model.set_is_last_backward(is_last)


class Pipeline:
    """Several stages: a schedule of ``torch.distributed.pipelining``.

    Shapes of what stages exchange are given to torch, so no metadata is sent and no trial
    forward runs.
    """

    def __init__(
        self, stages: Sequence[Stage], config: Config, mesh: Mesh, loss: LossFunction
    ) -> None:
        self.has_first = any(s.is_first for s in stages)
        self.has_last = any(s.is_last for s in stages)
        layout = mesh.layout
        rows_per_rank = config.train.global_batch_size // layout.dp
        num_microbatches = rows_per_rank // config.train.micro_batch_size
        torch_stages = [_torch_stage(stage, config, mesh) for stage in stages]
        # The loss is already divided by the global number of tokens: nothing is left to scale.
        if layout.schedule == "interleaved":
            self.schedule = ScheduleInterleaved1F1B(
                list(torch_stages), num_microbatches, loss_fn=loss, scale_grads=False
            )
        else:
            single = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[layout.schedule]
            self.schedule = single(
                torch_stages[0], num_microbatches, loss_fn=loss, scale_grads=False
            )
        self._zero = torch.zeros((), dtype=DTYPES[config.train.precision], device=mesh.device)

    def run(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """See ``Executor.run``."""
        losses: list[Tensor] = []
        args = (inputs,) if self.has_first else ()
        if self.has_last:
            self.schedule.step(*args, target=targets, losses=losses, return_outputs=False)
        else:
            self.schedule.step(*args, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else self._zero


def _torch_stage(stage: Stage, config: Config, mesh: Mesh) -> PipelineStage:
    layout, model = mesh.layout, config.model
    rows, dtype = config.train.micro_batch_size, DTYPES[config.train.precision]
    split_sequence = layout.tp > 1 and layout.sequence_parallel
    seq_len = model.seq_len // layout.tp if split_sequence else model.seq_len
    _, vocab = split_dim(model.vocab_size, layout.tp, mesh.coordinate.tp)
    tokens = torch.empty(rows, model.seq_len, dtype=torch.int64, device="meta")
    hidden = torch.empty(
        rows, seq_len, model.hidden_size, dtype=dtype, device="meta", requires_grad=True
    )
    logits = torch.empty(rows, model.seq_len, vocab, dtype=dtype, device="meta", requires_grad=True)
    return PipelineStage(
        stage.model,
        stage.index,
        layout.num_stages,
        mesh.device,
        input_args=(tokens if stage.is_first else hidden,),
        output_args=(logits if stage.is_last else hidden,),
        group=mesh.group("pp"),
    )


def build_executor(
    stages: Sequence[Stage], config: Config, mesh: Mesh, gradients: Gradients, loss: LossFunction
) -> Executor:
    """A pipeline where there are several pipeline ranks, else a loop over micro-batches."""
    if mesh.layout.pp > 1:
        return Pipeline(stages, config, mesh, loss)
    return MicrobatchLoop(stages[0], config, mesh, gradients, loss)
