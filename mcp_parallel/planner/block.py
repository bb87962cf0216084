"""Time of one Transformer block's passes on one rank. No torch.

Letters: t = tokens of a micro-batch on this rank (micro-batch * sequence / cp), h = hidden size, q
= h / tp and kv = features of queries and of keys on this rank, f = ffn_size / tp, c = bytes of an
activation. Between the matmuls' regions a rank holds t / tp tokens (sequence parallelism). u = 2
and rotary positions for Llama's blocks, u = 1 and none for those of images (``shape.py``).

    matmuls     [t, h] x [h, q + 2 kv], [t, q] x [q, h], [t, h] x [h, u f], [t, f] x [f, h];
                twice that in the backward pass
    attention   2 mb S^2 / cp * q operations in the forward pass (causal: half of two products of
                2 mb S^2 q, else all), and five products in the backward pass where that has two
    memory      10 t h / tp + 2 t (q + kv) + (u + 1) t f elements: norms and sums, rotary, SwiGLU
                or GELU
    fp8         7 bytes an element of each matmul's input: its largest value, cast and transpose
    tp          an all-gather and a reduce-scatter of t h, twice in each pass
    cp          keys and values of the other ranks, in the backward pass their gradients too; a
                ring reads and writes fp32 results to merge each further block: 12 bytes an element
"""

from __future__ import annotations

from typing import NamedTuple

from mcp_parallel.planner import roofline
from mcp_parallel.planner.hardware import Hardware
from mcp_parallel.planner.layouts import Job
from mcp_parallel.planner.links import all_gather_seconds
from mcp_parallel.planner.shape import kv_size, shape_of
from mcp_parallel.planner.topology import Group

FP8_CAST_BYTES = 7
"""Read 2 for the largest value, 2 and write 1 for the cast, read 1 and write 1 to transpose."""
MERGE_BYTES = 12
"""Read two fp32 results and write one."""
CHEAP_PART = 0.6
"""Norms and SwiGLU as part of the memory-bound work: what selective checkpointing runs again."""
_LAUNCHES = 8
"""Memory-bound kernels of a block's forward pass."""


class BlockTime(NamedTuple):
    """Seconds of one block and micro-batch."""

    forward_compute: float
    backward_compute: float
    """With what checkpointing computes again."""
    forward_tp: float
    """Exposed tensor-parallel communication."""
    backward_tp: float
    forward_cp: float
    """Exposed context-parallel communication."""
    backward_cp: float

    @property
    def forward(self) -> float:
        """All of the forward pass."""
        return self.forward_compute + self.forward_tp + self.forward_cp

    @property
    def backward(self) -> float:
        """All of the backward pass."""
        return self.backward_compute + self.backward_tp + self.backward_cp


def block_time(
    job: Job, *, tokens: int, tp: int, tp_group: Group, cp_group: Group, checkpointing: str
) -> BlockTime:
    """The passes of one block over one micro-batch.

    Args:
        job: what runs.
        tokens: t.
        tp: tensor-parallel degree.
        tp_group: its ranks' places.
        cp_group: of the context-parallel ranks.
        checkpointing: none, selective or full.
    """
    linear = linear_seconds(job, tokens, tp)
    w2 = roofline.matmul_seconds(
        job.hardware, tokens, job.model.hidden_size, job.model.ffn_size / tp, job.precision
    )
    attention, attention_back = attention_pair(job, tokens, tp, cp_group.ranks)
    cheap = cheap_seconds(job, tokens, tp)
    cast, cast_back = cast_seconds(job, tokens, tp)
    each = tp_collective_seconds(job, tokens, tp_group)
    cp_forward, cp_backward = context_seconds(job, tokens, tp, cp_group, attention, attention_back)

    forward = linear + attention + cheap + cast
    backward = 2 * linear + attention_back + 2 * cheap + cast_back
    gathered_again = 0 if job.runtime.saves_gathered else 2
    tp_back = (4 + gathered_again) * each
    if checkpointing == "selective":
        backward += CHEAP_PART * cheap
    elif checkpointing == "full":  # it stops before the block's last matmul and its reduce-scatter
        backward += forward - w2
        tp_back += 3 * each
        cp_backward += cp_forward
    return BlockTime(forward, backward, 4 * each, tp_back, cp_forward, cp_backward)


def linear_seconds(job: Job, tokens: int, tp: int) -> float:
    """The matmuls of a forward pass."""
    model, hardware = job.model, job.hardware
    hidden, q, kv = model.hidden_size, model.hidden_size / tp, kv_size(model) / tp
    ffn = model.ffn_size / tp
    up = shape_of(model).up_matrices
    shapes = ((q + 2 * kv, hidden), (hidden, q), (up * ffn, hidden), (hidden, ffn))
    return sum(roofline.matmul_seconds(hardware, tokens, n, k, job.precision) for n, k in shapes)


def attention_pair(job: Job, tokens: int, tp: int, cp: int) -> tuple[float, float]:
    """Attention's forward and backward pass."""
    model = job.model
    flops = tokens * 4 * shape_of(model).seen * model.seq_len * model.hidden_size / tp
    seen = model.seq_len / cp
    forward, backward = (
        roofline.attention_seconds(job.hardware, work, seen, job.precision, part)
        for work, part in zip(
            (flops, 2.5 * flops), job.hardware.attention or job.runtime.attention, strict=True
        )
    )
    return forward, backward


def cheap_seconds(job: Job, tokens: int, tp: int) -> float:
    """Memory-bound work of a forward pass."""
    model = job.model
    cut = 10 * tokens * model.hidden_size / tp
    shape = shape_of(model)
    turned = shape.turns * 2 * tokens * (model.hidden_size + kv_size(model)) / tp
    gated = (shape.up_matrices + 1) * tokens * model.ffn_size / tp
    num_bytes = job.compute_bytes * (cut + turned + gated)
    return roofline.memory_seconds(job.hardware, num_bytes) + _LAUNCHES * job.hardware.op_overhead_s


def cast_seconds(job: Job, tokens: int, tp: int) -> tuple[float, float]:
    """What it takes to bring inputs, and gradients of outputs, into fp8."""
    if job.precision != "fp8":
        return 0.0, 0.0
    model = job.model
    hidden, q, ffn = model.hidden_size, model.hidden_size / tp, model.ffn_size / tp
    inputs = tokens * (2 * hidden + q + ffn)
    grads = tokens * (q + 2 * kv_size(model) / tp + 2 * hidden + shape_of(model).up_matrices * ffn)
    forward, backward = (
        roofline.memory_seconds(job.hardware, FP8_CAST_BYTES * elements)
        for elements in (inputs, grads)
    )
    return forward, backward


def tp_collective_seconds(job: Job, tokens: int, group: Group) -> float:
    """What one all-gather or reduce-scatter of a layer's tokens adds to its time."""
    if group.ranks == 1:
        return 0.0
    seconds = all_gather_seconds(
        job.compute_bytes * tokens * job.model.hidden_size, group, job.hardware
    )
    return exposed(seconds, job.runtime.tp_overlap * seconds, job.hardware)


def context_seconds(
    job: Job, tokens: int, tp: int, group: Group, attention: float, attention_back: float
) -> tuple[float, float]:
    """What keys and values of other ranks add to the forward and to the backward pass."""
    if group.ranks == 1:
        return 0.0, 0.0
    width = 2 * kv_size(job.model) / tp
    num_bytes = job.compute_bytes * tokens * width * group.ranks
    seconds = all_gather_seconds(num_bytes, group, job.hardware)
    if not job.runtime.cp_overlaps:
        return seconds, 2 * seconds
    merged = MERGE_BYTES * (group.ranks - 1) * tokens * job.model.hidden_size / tp
    merge = roofline.memory_seconds(job.hardware, merged)
    return (
        exposed(seconds, attention, job.hardware) + merge,
        exposed(2 * seconds, attention_back, job.hardware) + merge,
    )


def exposed(seconds: float, beside: float, hardware: Hardware) -> float:
    """What communication adds to the time of work of which ``beside`` seconds can run beside it.

    Hidden communication still slows that work down.
    """
    hidden = min(seconds, beside)
    return seconds - hidden + hardware.overlap_slowdown * hidden
