"""Predicted time of a training step, term by term. No torch.

    step = m * pace + bubble + messages + data parallelism + optimizer

pace is the slowest pipeline rank's forward and backward of one micro-batch: its blocks, embedding
and head where they are. Terms of one shape are computed once for all layouts that share it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mcp_parallel.planner import block, pipeline, roofline, sharding
from mcp_parallel.planner.flops import flops_per_token
from mcp_parallel.planner.layouts import Job, PlannedLayout
from mcp_parallel.planner.links import message_seconds
from mcp_parallel.planner.stages import RankStages, rank_parameters, rank_stages
from mcp_parallel.planner.topology import Group, group_of

_LOGIT_BYTES = 16
"""An element of the logits in fp32 is written by the matmul, read for the sum, and read and written
for the gradient."""


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step and their parts."""

    step_s: float
    compute_s: float
    """Of the slowest rank, what checkpointing computes again included."""
    tensor_s: float
    context_s: float
    bubble_s: float
    """Waiting of the slowest rank for others' stages."""
    messages_s: float
    data_s: float
    optimizer_s: float
    """Of the update, and what a step takes whatever its layout."""
    tokens: int
    """Of a step, over all ranks."""

    @property
    def bubble(self) -> float:
        """Part of the step that is spent waiting in the pipeline."""
        return (self.bubble_s + self.messages_s) / self.step_s

    def tokens_per_s(self, ranks: int) -> float:
        """Of one rank."""
        return self.tokens / self.step_s / ranks

    def tflops(self, job: Job, *, causal: bool = True) -> float:
        """TFLOP/s of model work of one rank."""
        return self.tokens_per_s(job.ranks) * flops_per_token(job.model, causal=causal) / 1e12

    def towards(self, other: StepCost, part: float) -> StepCost:
        """This step with ``part`` of what makes it another one, term by term."""
        mixed = {
            name: (1 - part) * getattr(self, name) + part * getattr(other, name)
            for name in ("step_s", "compute_s", "tensor_s", "context_s", "bubble_s", "messages_s")
        }
        return replace(self, **mixed)

    def parts(self) -> dict[str, float]:
        """Seconds by name; they sum up to the step."""
        return {
            "compute": self.compute_s,
            "tensor parallel": self.tensor_s,
            "context parallel": self.context_s,
            "bubble": self.bubble_s,
            "messages": self.messages_s,
            "data parallel": self.data_s,
            "optimizer": self.optimizer_s,
        }


class _End(NamedTuple):
    """Embedding or head, seconds of a micro-batch."""

    forward: float
    backward: float


class CostModel:
    """The step time of layouts of one job.

    Cost: some 10 microseconds a layout once the terms of its shape are known.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._blocks: dict[Any, block.BlockTime] = {}
        self._heads: dict[Any, _End] = {}
        self._embeddings: dict[Any, _End] = {}

    def step(self, layout: PlannedLayout) -> StepCost:
        """The predicted step of a layout whose batch divides."""
        job, count = self.job, self.job.num_microbatches(layout)
        each, head = self._block(layout), self._head(layout)
        embedding = self._embedding(layout)
        stages = rank_stages(job.model.num_layers, layout)
        passes = [_passes(rank, each, embedding, head) for rank in stages]
        times = [sum(pair) for pair in passes]
        slowest = max(range(layout.pp), key=times.__getitem__)
        pace, mean = times[slowest], sum(times) / layout.pp

        bubble = mean * pipeline.bubble_units(layout.schedule, layout.pp, layout.stages_per_rank)
        message = message_seconds(
            self._message_bytes(layout), group_of("pp", layout, job.hardware), job.hardware
        )
        messages = pipeline.exposed_messages_seconds(
            layout.schedule, layout.pp, layout.stages_per_rank, count, message, pace
        )
        data, optimizer = self._data(layout, stages, passes)
        optimizer += job.hardware.step_overhead_s

        layers = count * stages[slowest].layers
        tensor = layers * (each.forward_tp + each.backward_tp)
        context = layers * (each.forward_cp + each.backward_cp)
        return StepCost(
            step_s=count * pace + bubble + messages + data + optimizer,
            compute_s=count * pace - tensor - context,
            tensor_s=tensor,
            context_s=context,
            bubble_s=bubble,
            messages_s=messages,
            data_s=data,
            optimizer_s=optimizer,
            tokens=job.global_batch_size * job.model.seq_len,
        )

    def _message_bytes(self, layout: PlannedLayout) -> float:
        tokens = self.job.tokens(layout)
        return self.job.compute_bytes * tokens * self.job.model.hidden_size / layout.tp

    def _block(self, layout: PlannedLayout) -> block.BlockTime:
        cp_group = group_of("cp", layout, self.job.hardware)
        tokens = self.job.tokens(layout)
        key = (tokens, layout.tp, cp_group, layout.activation_checkpointing)
        found = self._blocks.get(key)
        if found is None:
            found = self._blocks[key] = block.block_time(
                self.job,
                tokens=tokens,
                tp=layout.tp,
                tp_group=group_of("tp", layout, self.job.hardware),
                cp_group=cp_group,
                checkpointing=layout.activation_checkpointing,
            )
        return found

    def _embedding(self, layout: PlannedLayout) -> _End:
        """Of patches; a token's row is looked up in no time to speak of."""
        job, matrix = self.job, self.job.shape.embedding_matrix
        if not matrix:
            return _End(0.0, 0.0)
        tokens = -(-job.tokens(layout) // layout.tp)  # each rank embeds its own
        found = self._embeddings.get(tokens)
        if found is None:
            hidden = job.model.hidden_size
            precision = "bf16" if job.precision == "fp8" else job.precision
            product = roofline.matmul_seconds(
                job.hardware, tokens, hidden, matrix / hidden, precision
            )
            found = self._embeddings[tokens] = _End(product, product)  # images have no gradient
        return found

    def _head(self, layout: PlannedLayout) -> _End:
        tokens = self.job.head_tokens(layout)
        key = (tokens, layout.tp)
        found = self._heads.get(key)
        if found is None:
            group = group_of("tp", layout, self.job.hardware)
            found = self._heads[key] = self._head_time(tokens, layout.tp, group)
        return found

    def _head_time(self, tokens: int, tp: int, group: Group) -> _End:
        """Logits in the activations' format, loss in fp32."""
        job, vocab = self.job, self.job.model.vocab_size / tp
        precision = "bf16" if job.precision == "fp8" else job.precision
        product = roofline.matmul_seconds(
            job.hardware, tokens, vocab, job.model.hidden_size, precision
        )
        loss = roofline.memory_seconds(job.hardware, _LOGIT_BYTES * tokens * vocab)
        collective = block.tp_collective_seconds(job, tokens, group)
        return _End(product + loss / 2 + collective, 2 * product + loss / 2 + collective)

    def _data(
        self,
        layout: PlannedLayout,
        stages: tuple[RankStages, ...],
        passes: list[tuple[float, float]],
    ) -> tuple[float, float]:
        """Collectives over data-parallel ranks and the optimizer, of the rank that takes most."""
        job, group = self.job, group_of("dp_cp", layout, self.job.hardware)
        count = job.num_microbatches(layout)
        worst = (0.0, 0.0)
        for rank in {0, layout.pp - 1}:  # those with embedding and head
            held = stages[rank]
            parameters = rank_parameters(job.shape, held, layout.tp)
            windows = sharding.windows_of(layout, count, *passes[rank])
            data = sharding.sharding_seconds(job, layout, group, parameters, held.layers, windows)
            optimizer = sharding.optimizer_seconds(job, layout, group.ranks, parameters)
            worst = max(worst, (data, optimizer), key=sum)
        return worst


def _passes(
    rank: RankStages, each: block.BlockTime, embedding: _End, head: _End
) -> tuple[float, float]:
    """Forward and backward of one micro-batch over all stages of a rank."""
    forward, backward = rank.layers * each.forward, rank.layers * each.backward
    if rank.has_embedding:
        forward, backward = forward + embedding.forward, backward + embedding.backward
    if rank.has_head:
        forward, backward = forward + head.forward, backward + head.backward
    return forward, backward
