"""A pipeline plan, run on the stages of ``torch.distributed.pipelining``.

The order is ours (``mcp_parallel.schedules``); torch's runtime adds the messages between ranks and,
with ``fully_shard``, the gathering of parameters and the reduction of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import P2POp
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from mcp_kernels.nn import WeightGradients, deferred_weight_gradients
from mcp_kernels.spans import span
from mcp_parallel.config import Config
from mcp_parallel.division import microbatch_counts
from mcp_parallel.layout import Layout, split_dim
from mcp_parallel.model.family import family_of
from mcp_parallel.parallel.clock import Clock, Occupation
from mcp_parallel.parallel.mesh import Mesh
from mcp_parallel.parallel.message_memory import Outbox, empty, fill
from mcp_parallel.parallel.parallelize import Stage
from mcp_parallel.parallel.precision import Precision
from mcp_parallel.schedules.action import Kind, Plan
from mcp_parallel.schedules.build import build_plan
from mcp_parallel.schedules.messages import Message, proofs_of_delivery

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(logits ``[b, ..., V]``, targets ``[b, ...]``) -> this micro-batch's share of the step's loss."""


class Pipeline:
    """Several pipeline ranks: each runs its order of the plan.

    Shapes of what stages exchange are given to torch, so no metadata is sent and no trial
    forward runs.

    Args:
        stages: this rank's, in the order of the model.
        config: the run.
        mesh: this rank's.
        loss: of one micro-batch, already divided by the global number of tokens.
    """

    def __init__(
        self, stages: Sequence[Stage], config: Config, mesh: Mesh, loss: LossFunction
    ) -> None:
        self.has_first = any(s.is_first for s in stages)
        self.has_last = any(s.is_last for s in stages)
        self.occupation: Occupation | None = None
        self._clock = clock = Clock(mesh.device)
        self.plan = plan_of(config, mesh.layout, mesh.coordinate.dp)

        def timed_loss(output: Tensor, targets: Tensor) -> Tensor:
            with span("loss"), clock.working():
                return loss(output, targets)

        self._outbox = Outbox(proofs_of_delivery(self.plan, mesh.coordinate.pp))
        # The loss is already divided by the global number of tokens: nothing is left to scale.
        self.schedule = _PipelineScheduleRuntime(
            [_torch_stage(stage, config, mesh, clock, self._outbox) for stage in stages],
            self.plan.num_microbatches,
            loss_fn=timed_loss,
            scale_grads=False,
        )
        self.schedule._prepare_schedule_with_comms(torch_actions(self.plan))
        self._zero = torch.zeros((), dtype=Precision.of(config).state, device=mesh.device)

    def run(self, inputs: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """See ``Executor.run``."""
        losses: list[Tensor] = []
        args = (inputs,) if self.has_first else ()
        # Cut into micro-batches as the rows are, and given to every stage beside its activations.
        side: dict[str, Any] = {} if documents is None else {"documents": documents}
        self._outbox.clear()
        self._clock.start()
        if self.has_last:
            self.schedule.step(*args, target=targets, losses=losses, return_outputs=False, **side)
        else:
            self.schedule.step(*args, return_outputs=False, **side)
        self.occupation = self._clock.stop()
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else self._zero


def plan_of(config: Config, layout: Layout, dp: int = 0) -> Plan:
    """The pipeline plan of a checked config at ``layout``, of data-parallel replica ``dp``."""
    num_microbatches = microbatch_counts(config)[dp]
    return build_plan(layout.schedule, layout.pp, num_microbatches, layout.stages_per_rank)


def torch_actions(plan: Plan) -> dict[int, list[_Action | None]]:
    """The plan in the words of torch's runtime, by pipeline rank."""
    return {
        rank: [_Action.from_str(f"{a.stage}{a.kind}{a.microbatch}") for a in order]
        for rank, order in enumerate(plan.orders)
    }


class _TimedStage(PipelineStage):
    """A stage whose work is on the clock; waiting for messages happens outside of these calls.

    Its input gradient is a whole backward that leaves out the products for the weights, and its
    weight gradient is those: each node of the graph runs once, and once it has run neither it nor
    a parameter's value is needed (torch's own split cuts the graph, runs nodes with both gradients
    twice, and reads parameters that ZeRO-3 has freed).
    """

    clock: Clock
    outbox: Outbox
    undone: dict[int, WeightGradients]
    """What the input gradients of a micro-batch left for its weight gradients."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.outbox.has_come(Message(False, self.stage_index - 1, fwd_chunk_id))
        with self._at_work("F", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        self.outbox.has_come(Message(True, self.stage_index + 1, bwd_chunk_id))
        run = partial(super().backward_one_chunk, bwd_chunk_id, loss, last_backward=last_backward)
        with self._at_work("B" if full_backward else "I", bwd_chunk_id):
            if full_backward:
                run()
            else:
                # One pass through the graph, which leaves the linear layers' weights out.
                with deferred_weight_gradients() as undone:
                    run()
                self.undone[bwd_chunk_id] = undone
        if loss is not None:
            loss.detach_()  # the runtime keeps it, and its graph ends in the buffer of the input
        empty(self.args_recv_info[bwd_chunk_id])
        empty(self.grad_recv_info[bwd_chunk_id])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        del last_backward
        with self._at_work("W", bwd_chunk_id):
            self.undone.pop(bwd_chunk_id).run()
            if isinstance(self.submod, FSDPModule):
                widen_gradients(self.submod)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        fill(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        fill(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        self.outbox.put(Message(False, self.stage_index, fwd_chunk_id), ops)
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        self.outbox.put(Message(True, self.stage_index, bwd_chunk_id), ops)
        return ops

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        with self._on_meta():
            super()._setup_forward_recv_info(num_microbatches, has_backward)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        with self._on_meta():
            super()._setup_backward_recv_info(num_microbatches)

    @contextmanager
    def _on_meta(self) -> Iterator[None]:
        """Buffers of shapes alone."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    @contextmanager
    def _at_work(self, kind: Kind, microbatch: int) -> Iterator[None]:
        with span(f"{kind}{microbatch} of stage {self.stage_index}"), self.clock.working():
            yield


def widen_gradients(model: FSDPModule) -> None:
    """Add 16-bit gradients to the fp32 sums, as ``fully_shard`` does when a backward ends."""
    for state in fully_shard.state(model)._state_ctx.all_states:  # pyright: ignore[reportFunctionMemberAccess]
        for group in state._fsdp_param_groups:
            for parameter in group.fsdp_params:
                if parameter.reduce_dtype is not None:
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()


def hidden_like(config: Config, mesh: Mesh) -> Tensor:
    """What a micro-batch is between two stages on this rank, without memory: ``[rows, S', D]``."""
    layout, model = mesh.layout, config.model
    seq_len = model.seq_len // layout.cp
    if layout.tp > 1 and layout.sequence_parallel:
        _, seq_len = split_dim(seq_len, layout.tp, mesh.coordinate.tp)
    shape = (config.train.micro_batch_size, seq_len, model.hidden_size)
    return torch.empty(shape, dtype=Precision.of(config).compute, device="meta")


def _torch_stage(
    stage: Stage, config: Config, mesh: Mesh, clock: Clock, outbox: Outbox
) -> PipelineStage:
    layout, model = mesh.layout, config.model
    rows, dtype = config.train.micro_batch_size, Precision.of(config).compute
    length = model.seq_len // layout.cp
    family = family_of(model)
    inputs = torch.empty(
        rows, *family.input_shape(model, length), dtype=family.input_dtype, device="meta"
    )
    hidden = hidden_like(config, mesh).requires_grad_()
    *each, vocab = family.output_shape(model, length)
    _, vocab = split_dim(vocab, layout.tp, mesh.coordinate.tp)
    logits = torch.empty(rows, *each, vocab, dtype=dtype, device="meta", requires_grad=True)
    made = _TimedStage(
        stage.model,
        stage.index,
        layout.num_stages,
        mesh.device,
        input_args=(inputs if stage.is_first else hidden,),
        output_args=(logits if stage.is_last and not stage.model.leaves_head else hidden,),
        group=mesh.group("pp"),
    )
    made.clock, made.outbox, made.undone = clock, outbox, {}
    return made
