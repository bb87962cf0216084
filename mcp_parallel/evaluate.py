"""Loss and accuracy on the data's validation part, the same figures on every rank of any layout.

A forward-only pass over the stages of the training step: the same micro-batches of the same size,
so it needs no memory that training does not, and no model of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from mcp_parallel.data.source import (
    Source,
    ValidationBatch,
    num_validation_batches,
    validation_batch,
)
from mcp_parallel.model.loss import IGNORED
from mcp_parallel.model.traits import traits_of
from mcp_parallel.optim.build import model_mesh_of
from mcp_parallel.parallel.head_loss import build_stage_loss
from mcp_parallel.parallel.pipeline import hidden_like
from mcp_parallel.parallel.tensor import build_token_loss, vocab_parallel_argmax
from mcp_parallel.step import TrainingStep
from mcp_parallel.unread import UNREADABLE, padding_batch


@dataclass(frozen=True)
class Validation:
    """What a model does on samples that it is not trained on."""

    loss: float
    """Mean over the samples (of text: over the tokens), nats."""
    accuracy: float | None
    """Share of samples whose class is the most likely one, 0 to 1; None of text."""


class Evaluator:
    """Measures the model of a training step as it stands.

    Args:
        step: every rank's; its parameters are read and left as they are.
        source: of the run.
    """

    def __init__(self, step: TrainingStep, source: Source) -> None:
        self._step = step
        self._source = source
        self._config, self._mesh = step.config, step.mesh
        vocab_size = self._config.model.vocab_size
        self._token_loss = build_token_loss(vocab_size, self._mesh)
        self._vocab_size = vocab_size
        self._reads_text = traits_of(self._config.model).continues_text
        # As in training: of a large vocabulary the logits never exist at once.
        model_mesh = model_mesh_of(self._config.train, self._mesh)
        self._text_loss = build_stage_loss(step.stages, self._config, model_mesh)
        self.unread: Exception | None = None
        """Why this rank could not read some of its rows."""
        self.is_unread = False
        """Some rank could not."""

    @torch.no_grad()
    def __call__(self) -> Validation | None:
        """Loss and accuracy; None where the data has no validation part. Collective over the mesh.

        None as well where some rank could not read its rows: ``is_unread`` is true then.

        Cost: one forward of that part.
        """
        sums = torch.zeros(4, dtype=torch.float64)  # loss, right answers, samples, unread batches
        num_batches = num_validation_batches(self._source, self._config)
        for index in range(num_batches):
            for out, wanted in self._forward(self._batch(index)):
                sums[:3] += self._score(out, wanted)
        if not num_batches:
            return None
        sums[3] = self.unread is not None
        for stage in self._step.stages:
            _free_whole_parameters(stage.model)
        if self._mesh.world is not None:
            sums = sums.to(self._mesh.device)
            dist.all_reduce(sums, group=self._mesh.world)
        loss, right, count, num_unread = sums.tolist()
        self.is_unread = num_unread > 0
        if self.is_unread:
            return None
        return Validation(loss / count, None if self._reads_text else right / count)

    def _batch(self, index: int) -> ValidationBatch:
        """This rank's rows; padding where they cannot be read, since the others wait for it."""
        rows = self._step.rows()
        try:
            return validation_batch(self._source, self._config, index, rows)
        except UNREADABLE as error:
            self.unread = error
            return ValidationBatch(*padding_batch(self._config, len(rows)))

    def _forward(self, batch: ValidationBatch) -> Iterator[tuple[Tensor, Tensor]]:
        """(what the last stage gives, targets) of each micro-batch, on the ranks of that stage."""
        rows, device = self._config.train.micro_batch_size, self._mesh.device
        inputs, targets = torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)
        inputs, targets = self._step.own_part(inputs, targets)
        xs = inputs.split(rows)
        sides: list[tuple[Tensor, ...]] = [()] * len(xs)
        if batch.documents is not None:
            sides = [(part,) for part in torch.from_numpy(batch.documents).split(rows)]
        for x, wanted, side in zip(xs, targets.split(rows), sides, strict=True):
            out = self._through_stages(x.to(device), side)
            if out is not None:
                yield out, wanted.to(device)

    def _through_stages(self, x: Tensor, side: tuple[Tensor, ...]) -> Tensor | None:
        """The last stage's output where it is here; this rank's part of the way there elsewhere.

        Every rank goes through the stages in the order of the model, one micro-batch after the
        other, so each message has its receiver waiting.
        """
        layout, here = self._mesh.layout, self._mesh.coordinate.pp
        last = layout.num_stages - 1
        for stage in self._step.stages:
            before = layout.stage_owner(stage.index - 1) if not stage.is_first else here
            after = layout.stage_owner(stage.index + 1) if not stage.is_last else here
            if before != here:
                x = torch.empty_like(hidden_like(self._config, self._mesh), device=x.device)
                self._pass(dist.irecv, x, before)
            x = stage.model(x, *side)
            if after != here:
                self._pass(dist.isend, x.contiguous(), after)
        return x if self._step.stages[-1].index == last else None

    def _pass(self, operation: object, x: Tensor, pp: int) -> None:
        message = dist.P2POp(
            operation,  # pyright: ignore[reportArgumentType]
            x,
            self._mesh.peer_at_stage(pp),
            self._mesh.group("pp"),
        )
        for work in dist.batch_isend_irecv([message]):
            work.wait()

    def _score(self, out: Tensor, targets: Tensor) -> Tensor:
        """Summed loss, right answers and samples; zeros on all but one of the ranks of them."""
        count = (targets != IGNORED).sum()
        if self._reads_text:
            loss, right = self._text_loss(out, targets, 1.0), torch.zeros_like(count)
        else:
            loss = self._token_loss(out, targets)
            best = vocab_parallel_argmax(out, self._vocab_size, self._mesh.group("tp"))
            right = (best == targets).sum()
        if self._mesh.coordinate.tp != 0:
            return torch.zeros(3, dtype=torch.float64)
        return torch.stack([loss.double(), right.double(), count.double()]).cpu()


def _free_whole_parameters(model: torch.nn.Module) -> None:
    """Leave ``fully_shard``'s modules as a step leaves them: holding their own parts alone."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
