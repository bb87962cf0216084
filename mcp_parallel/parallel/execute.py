"""Forward and backward of one step's micro-batches, by a loop or by a pipeline schedule.

Both accumulate gradients into the parameters and return the sum of the micro-batch losses that
this rank computed (zero where the last stage is elsewhere).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from mcp_kernels.spans import span
from mcp_parallel.config import Config
from mcp_parallel.parallel.clock import Occupation
from mcp_parallel.parallel.gradients import Gradients
from mcp_parallel.parallel.mesh import Mesh
from mcp_parallel.parallel.parallelize import Stage
from mcp_parallel.parallel.pipeline import LossFunction, Pipeline


class Executor(Protocol):
    """Runs forward and backward for a rank's rows of the global batch."""

    occupation: Occupation | None
    """Of the last run, where there are pipeline ranks that wait for each other."""

    def run(self, inputs: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """Forward and backward of all micro-batches.

        Args:
            inputs: int64 ``[rows, S]``, this rank's part of each sequence.
            targets: int64 ``[rows, S]``.
            documents: int64 ``[rows, whole sequence]``, where each position's document begins.

        Returns:
            The summed loss, detached, ``[]``.
        """
        ...


class MicrobatchLoop:
    """One stage: micro-batches one after the other, gradients sent during the last backward."""

    def __init__(
        self, stage: Stage, config: Config, mesh: Mesh, gradients: Gradients, loss: LossFunction
    ) -> None:
        self.occupation: Occupation | None = None
        self.model = stage.model
        self.rows = config.train.micro_batch_size
        self.zero = mesh.layout.zero
        self.gradients = gradients
        self.loss = loss

    def run(self, inputs: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """See ``Executor.run``."""
        total: Tensor | None = None
        xs = list(inputs.split(self.rows))
        sides = [()] * len(xs)
        if documents is not None:
            sides = [(part,) for part in documents.split(self.rows)]
        triples = zip(xs, targets.split(self.rows), sides, strict=True)
        for index, (x, y, side) in enumerate(triples):
            is_last = index == len(xs) - 1
            self._set_zero_stage(is_last)
            if is_last:
                self.gradients.before_last_backward()
            with span("forward"):
                loss = self.loss(self.model(x, *side), y)
            with span("backward"):
                loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total

    def _set_zero_stage(self, is_last: bool) -> None:
        """ZeRO 1 sums gradients on the last micro-batch only, 2 and 3 on each; 3 frees weights."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(is_last or self.zero >= 2)
            self.model.set_requires_all_reduce(is_last)  # HSDP's replicas are summed once a step
            self.model.set_reshard_after_backward(is_last or self.zero == 3)
            self.model.set_is_last_backward(is_last)


def build_executor(
    stages: Sequence[Stage], config: Config, mesh: Mesh, gradients: Gradients, loss: LossFunction
) -> Executor:
    """A pipeline where there are several pipeline ranks, else a loop over micro-batches."""
    if mesh.layout.pp > 1:
        return Pipeline(stages, config, mesh, loss)
    return MicrobatchLoop(stages[0], config, mesh, gradients, loss)
