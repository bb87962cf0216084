"""Time of one operation on one rank: matmul, attention, or bytes through memory. No torch.

A matmul [m, k] x [k, n] takes the longer of its arithmetic and of its bytes:

    max(2 m n k / (peak e(min(m, n, k))), bytes / (0.85 memory rate)) + overhead
    e(s) = matmul_efficiency * s / (s + half_efficiency_side)

e falls where a side is short, because a fixed time of filling and draining tiles is spread over less
work; that time stays as it is when a narrower format doubles the peak, so the half side doubles too.
"""

from __future__ import annotations

from mcp_parallel.planner.hardware import Hardware

MEMORY_EFFICIENCY = 0.85
"""Part of the memory's peak rate that streaming kernels reach (STREAM and copy kernels on A100 and
H100: 85 to 92 %)."""
ATTENTION_FORWARD = 0.8
"""Of a large matmul's rate: FlashAttention-3 reports 600 to 650 TFLOP/s in bf16 with causal masks,
head size 128 and 8k to 16k tokens on an H100, whose matmuls reach 750 to 800 (Shah et al. 2024)."""
ATTENTION_BACKWARD = 0.65
"""Likewise: 450 to 550 TFLOP/s."""
ATTENTION_HALF_LENGTH = 512.0
"""Sequence at which attention reaches half of that; its tiles are 128 rows, and causal masks leave
half of a diagonal tile's work undone."""


def matmul_seconds(hardware: Hardware, m: float, n: float, k: float, precision: str) -> float:
    """One matrix product; fp8 reads 1 byte an element and writes 2."""
    peak = hardware.peak(precision)
    reference = hardware.peak_flops.get("bf16", peak) if precision == "fp8" else peak
    half = hardware.half_efficiency_side * peak / reference
    side = min(m, n, k)
    rate = peak * hardware.matmul_efficiency * side / (side + half)
    read, write = {"fp8": (1, 2), "fp32": (4, 4)}.get(precision, (2, 2))
    num_bytes = read * (m * k + k * n) + write * m * n
    arithmetic = 2 * m * n * k / rate
    return max(arithmetic, memory_seconds(hardware, num_bytes)) + hardware.op_overhead_s


def attention_seconds(
    hardware: Hardware, flops: float, seq_len: float, precision: str, *, backward: bool
) -> float:
    """Attention's products, which stay in the activations' format under fp8.

    Args:
        hardware: of the rank.
        flops: forward work; the backward pass does five products where the forward pass does two.
        seq_len: keys that a block of queries meets.
        precision: of the run.
        backward: whether the backward pass is asked for.
    """
    peak = hardware.peak("bf16" if precision == "fp8" else precision)
    part = ATTENTION_BACKWARD if backward else ATTENTION_FORWARD
    rate = peak * hardware.matmul_efficiency * part * seq_len / (seq_len + ATTENTION_HALF_LENGTH)
    return (2.5 if backward else 1.0) * flops / rate + hardware.op_overhead_s


def memory_seconds(hardware: Hardware, num_bytes: float) -> float:
    """Bytes read and written by operations that do little else."""
    return num_bytes / (MEMORY_EFFICIENCY * hardware.memory_bytes_per_s)
