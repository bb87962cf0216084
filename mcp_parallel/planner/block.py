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
    fp8         each matmul's input is read for its largest value (2 bytes an element), cast (2 + 1)
                and, where the hardware wants that, transposed for the backward pass (1 + 1)
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
from mcp_parallel.planner.shape import kv_size
from mcp_parallel.planner.topology import Group

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
    gather = tp_gather_seconds(job, tokens, tp_group)
    cp_forward, cp_backward = context_seconds(job, tokens, tp, cp_group, attention, attention_back)

    forward = linear + attention + cheap + cast
    backward = 2 * linear + attention_back + 2 * cheap + cast_back
    tp_forward = tp_back = 2 * gather + 2 * each
    if not job.runtime.saves_gathered:
        tp_back += 2 * gather
    if checkpointing == "selective":
        backward += CHEAP_PART * cheap
    elif checkpointing == "full":  # it stops before the block's last matmul and its reduce-scatter
        backward += forward - w2
        tp_back += 2 * gather + each
        cp_backward += cp_forward
    return BlockTime(forward, backward, tp_forward, tp_back, cp_forward, cp_backward)


def linear_seconds(job: Job, tokens: int, tp: int) -> float:
    """The matmuls of a forward pass."""
    model, hardware = job.model, job.hardware
    hidden, q, kv = model.hidden_size, model.hidden_size / tp, kv_size(model) / tp
    ffn = model.ffn_size / tp
    up = job.shape.up_matrices
    shapes = ((q + 2 * kv, hidden), (hidden, q), (up * ffn, hidden), (hidden, ffn))
    return sum(roofline.matmul_seconds(hardware, tokens, n, k, job.precision) for n, k in shapes)


def attention_pair(job: Job, tokens: int, tp: int, cp: int) -> tuple[float, float]:
    """Attention's forward and backward pass."""
    model = job.model
    flops = tokens * 4 * job.shape.seen * model.seq_len * model.hidden_size / tp
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
    shape = job.shape
    turned = shape.turns * 2 * tokens * (model.hidden_size + kv_size(model)) / tp
    gated = (shape.up_matrices + 1) * tokens * model.ffn_size / tp
    num_bytes = job.compute_bytes * (cut + turned + gated)
    return roofline.memory_seconds(job.hardware, num_bytes) + _LAUNCHES * job.hardware.op_overhead_s


def cast_seconds(job: Job, tokens: int, tp: int) -> tuple[float, float]:
    """What it takes to bring inputs, and gradients of outputs, into fp8.

    Between the regions of tensor parallelism a rank that gathers fp8 casts its t / tp tokens, and
    transposes what it gathered.
    """
    if job.precision != "fp8":
        return 0.0, 0.0
    model, runtime = job.model, job.runtime
    q, ffn, up = model.hidden_size / tp, model.ffn_size / tp, job.shape.up_matrices
    share = tp if runtime.gathers_fp8 else 1
    between = 2 * model.hidden_size / share  # norms' results, and gradients of what is summed
    transpose = 0 if not job.hardware.transposes_fp8 else 1 if runtime.fuses_casts else 2
    cast = 5 + transpose
    made = cast - 2 * runtime.fuses_casts  # by a norm or an activation
    # Both inputs and both gradients that were gathered, read and written.
    turned = 2 * 4 * model.hidden_size if share > 1 and job.hardware.transposes_fp8 else 0
    inputs = made * (between + ffn) + cast * q
    grads = cast * (between + q + 2 * kv_size(model) / tp + up * ffn) + turned
    forward, backward = (
        roofline.memory_seconds(job.hardware, tokens * num_bytes) for num_bytes in (inputs, grads)
    )
    return forward, backward


def tp_collective_seconds(
    job: Job, tokens: int, group: Group, element_bytes: float | None = None
) -> float:
    """What one all-gather or reduce-scatter of a layer's tokens adds to its time."""
    if group.ranks == 1:
        return 0.0
    width = job.compute_bytes if element_bytes is None else element_bytes
    num_bytes = width * tokens * job.model.hidden_size
    seconds = all_gather_seconds(num_bytes, group, job.hardware)
    return exposed(seconds, job.runtime.tp_overlap * seconds, job.hardware)


def tp_gather_seconds(job: Job, tokens: int, group: Group) -> float:
    """Likewise of an all-gather, whose elements may travel as fp8; sums need 16 bits."""
    is_narrow = job.precision == "fp8" and job.runtime.gathers_fp8
    return tp_collective_seconds(job, tokens, group, 1 if is_narrow else None)


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
