"""Predicted peak of a rank's memory, in closed form. No torch.

For ``OURS`` the formulas follow ``mcp_parallel/memory``, which replays a step allocation by
allocation, and a test holds them together; here a layout takes microseconds. Letters as in
``block.py``; P = parameters of a rank, n = ranks that share them out, c = bytes of an activation
and of a 16-bit weight, g = largest group of weights that is whole at once under zero 3.

    state, zero 0   P (c + 4 + 4 + 8): weights, fp32 weights, gradients, moments (fp32: 4 + 4 + 8)
           zero 1   P (c + gradient) + P / n * 16
           zero 2   P c + P / n * 16, and g's gradients
           zero 3   P / n * 16, and g twice
    a block keeps   2 t h / tp + 2 t h + 2 t (q + kv) + (u + 1) t f elements and 4 t (q / d + 2 r)
                    bytes: u and r of ``shape.py``
        selective   what is cheap is made again: -t f, and without tensor parallelism -2 t h
        full        t h / tp
    pipeline        live micro-batches of ``pipeline.py``, and messages
    beside          one block's backward pass, the head's logits and its gradient
"""

from __future__ import annotations

from typing import NamedTuple

from mcp_parallel.planner.layouts import Job, PlannedLayout
from mcp_parallel.planner.pipeline import live_microbatches
from mcp_parallel.planner.shape import kv_size
from mcp_parallel.planner.stages import RankStages, end_parameters, rank_parameters, rank_stages

USABLE = 0.9
"""Part of the card that a plan may fill."""
FRAGMENTS = 0.1
"""Of what comes and goes, what the allocator loses between its blocks."""
_LOGITS_CHUNK = 256 * 2**20
"""As ``parallel/head_loss.py`` has it on a GPU."""
_WHOLE_LOGIT_BYTES = 8
"""A logit that is not split: 16-bit, its fp32 form, and a 16-bit gradient."""


class Memory(NamedTuple):
    """Bytes of one rank at its peak."""

    state: float
    """Weights, gradients and the optimizer's."""
    activations: float
    transients: float
    """Of the passes that are going on, logits included."""
    messages: float
    reserve: float
    """Contexts, libraries, communicators, and holes between tensors."""

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self)


def peak_memory(job: Job, layout: PlannedLayout) -> Memory:
    """The peak of the pipeline rank that needs most."""
    stages = rank_stages(job.model.num_layers, layout)
    # The first keeps most micro-batches, the last has the head; the second has neighbours on both
    # sides.
    ranks = {0, min(1, layout.pp - 1), layout.pp - 1}
    return max((rank_memory(job, layout, rank, stages[rank]) for rank in ranks), key=_total)


def _total(memory: Memory) -> float:
    return memory.total


def rank_memory(job: Job, layout: PlannedLayout, rank: int, stages: RankStages) -> Memory:
    """The peak of one pipeline rank."""
    count = job.num_microbatches(layout)
    live = live_microbatches(layout.schedule, layout.pp, layout.stages_per_rank, count, rank)
    hidden_bytes = job.compute_bytes * _cut(job, layout) * job.model.hidden_size
    messages = 0.0
    kept = live * stages.layers * kept_bytes(job, layout)
    if layout.pp > 1 and job.runtime.keeps_messages:
        # Both ends of every message, a stage's input among them.
        messages = 2.0 * stages.neighbours * count * hidden_bytes
        inputs = layout.stages_per_rank - stages.has_embedding
        kept = max(0.0, kept - live / layout.stages_per_rank * inputs * hidden_bytes)
    elif layout.pp > 1:
        messages = 2.0 * stages.neighbours * hidden_bytes
    kept += count * layout.micro_batch_size * job.shape.input_bytes
    transients = transient_bytes(job, layout, stages)
    during, ending = state_bytes(job, layout, stages, count)
    if ending > during + kept + transients:  # activations are gone when gradients are reduced
        during, kept, transients = ending, 0.0, 0.0
    reserve = job.hardware.reserve_bytes + FRAGMENTS * (kept + transients + messages)
    return Memory(during, kept, transients, messages, reserve)


def _cut(job: Job, layout: PlannedLayout) -> float:
    """Tokens of a rank between layers."""
    return -(-job.tokens(layout) // layout.tp)


def state_bytes(
    job: Job, layout: PlannedLayout, stages: RankStages, count: int
) -> tuple[float, float]:
    """Weights, gradients and optimizer state of one rank.

    Args:
        job: what runs.
        layout: its layout.
        stages: of the rank.
        count: micro-batches.

    Returns:
        Bytes while activations are at their most, and when the last gradients are reduced.
    """
    parameters = rank_parameters(job.shape, stages, layout.tp)
    ranks, zero, c = layout.dp * layout.cp, layout.zero, job.compute_bytes
    state, is_narrow = job.state_bytes, c < job.state_bytes
    if zero == 0 or ranks == 1:
        weights = c + (state if is_narrow else 0)
        buckets = state if is_narrow or ranks > 1 else 0
        raw = 0 if is_narrow or (count == 1 and buckets) else state
        whole = parameters * (weights + 2 * state + buckets + raw)
        return whole, whole
    fixed = job.runtime.whole_gradient_bytes
    sharded = parameters / ranks * job.runtime.shard_bytes * state / 4
    group = _largest_group(job, layout, stages)
    reduced = state * group
    if zero == 3:
        blocks = 2 * job.shape.block.on_rank(layout.tp)
        root = max(0.0, group - blocks / 2) if group > blocks / 2 else 0.0
        during = sharded + c * (blocks + root) + c * group + reduced
        return during, during
    raw = c if fixed is None else fixed[zero]
    if fixed is None and layout.pp == 1 and (zero == 2 or count == 1):
        during = sharded + parameters * c + raw * group + reduced
        return during, during
    # Sums of gradients take their shards' place only when raw gradients are reduced.
    sums = 0.0 if fixed is not None else parameters / ranks * state
    during = sharded - sums + parameters * (c + raw)
    return during, during + reduced


def _largest_group(job: Job, layout: PlannedLayout, stages: RankStages) -> float:
    """Elements of the largest group of weights: a block's, or embedding and head."""
    block = job.shape.block.on_rank(layout.tp)
    return max(block, end_parameters(job.shape, stages, layout.tp))


def kept_bytes(job: Job, layout: PlannedLayout) -> float:
    """What a block keeps of one micro-batch for the backward pass."""
    model, c, tp = job.model, job.compute_bytes, layout.tp
    tokens, cut, shape = job.tokens(layout), _cut(job, layout), job.shape
    hidden = model.hidden_size
    if layout.activation_checkpointing == "full":
        return c * cut * hidden
    drops = layout.activation_checkpointing == "selective"
    normed = 2 * (tokens if tp > 1 and job.runtime.saves_gathered else cut) * hidden
    if drops and (tp == 1 or not job.runtime.saves_gathered):
        normed = 0
    attention = 2 * tokens * (hidden + kv_size(model)) / tp
    ffn = (shape.up_matrices + (not drops)) * tokens * model.ffn_size / tp
    if job.precision == "fp8":  # inputs of matmuls wait in fp8, attention's result in both formats
        normed /= 2
        attention += tokens * hidden / tp / 2
        ffn -= (not drops) * tokens * model.ffn_size / tp / 2
    rows = 4 * (tokens * model.num_heads / tp + 2 * shape.row_scales * cut)
    return c * (2 * cut * hidden + normed + attention + ffn) + rows


def transient_bytes(job: Job, layout: PlannedLayout, stages: RankStages) -> float:
    """What one block's backward pass, or the head, has beside what is kept."""
    model, c, tp = job.model, job.compute_bytes, layout.tp
    tokens, hidden, shape = job.tokens(layout), model.hidden_size, job.shape
    gathered = tokens * hidden if tp > 1 else 0
    inner = shape.up_matrices * tokens * model.ffn_size / tp
    backward = c * (inner + _cut(job, layout) * hidden + gathered)
    if layout.activation_checkpointing == "full":
        backward += kept_bytes(job, layout._replace(activation_checkpointing="none"))
    if not stages.has_head:
        return backward
    if shape.head_positions == 1:  # of a sample: what it adds is the last norm's
        return max(backward, 3 * c * _cut(job, layout) * hidden)
    vocab = model.vocab_size / tp
    table_grad = job.state_bytes * vocab * hidden
    if job.runtime.splits_logits:
        logits = min((job.state_bytes + c) * tokens * vocab, 1.5 * _LOGITS_CHUNK)
    else:
        logits, table_grad = _WHOLE_LOGIT_BYTES * tokens * vocab, 0
    head = logits + c * (tokens * hidden + gathered)
    waiting = table_grad + c * tokens * hidden
    if layout.pp > 1 and layout.schedule == "gpipe":  # every loss comes before the first backward
        return backward + head + job.num_microbatches(layout) * waiting
    return max(backward, head + waiting)
