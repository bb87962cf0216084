"""Time of one operation on one rank: matmul, attention, or bytes through memory. No torch.

A matmul [m, k] x [k, n] takes the longer of its arithmetic and of its bytes:

    max(2 m n k / (peak matmul_efficiency e(m) e(n) e(k)), bytes / (0.85 memory rate)) + overhead
    e(s) = s / (s + half_efficiency_side)

e falls where a side is short: tiles at the edge are part empty, and each tile fills and drains a
pipeline along k. That takes the same time in a narrower format, whose half side is as much longer
as its peak is higher. With an efficiency of 0.8 on an H100 this gives 313, 592, 711 and 754
TFLOP/s for bf16 cubes of 1,024 to 8,192.
"""

from __future__ import annotations

import math

from mcp_parallel.planner.hardware import Hardware

MEMORY_EFFICIENCY = 0.85
"""Part of the memory's peak rate that streaming kernels reach (STREAM and copy kernels on A100 and
H100: 85 to 92 %)."""
ATTENTION_HALF_LENGTH = 512.0
"""Sequence at which attention reaches half of that; its tiles are 128 rows, and causal masks leave
half of a diagonal tile's work undone."""


def matmul_seconds(hardware: Hardware, m: float, n: float, k: float, precision: str) -> float:
    """One matrix product; fp8 reads 1 byte an element and writes 2."""
    peak = hardware.peak(precision)
    reference = hardware.peak_flops.get("bf16", peak) if precision == "fp8" else peak
    half = hardware.half_efficiency_side * peak / reference
    shape = math.prod(side / (side + half) for side in (m, n, k))
    rate = peak * hardware.matmul_efficiency * shape
    read, write = {"fp8": (1, 2), "fp32": (4, 4), "fp64": (8, 8)}.get(precision, (2, 2))
    num_bytes = read * (m * k + k * n) + write * m * n
    arithmetic = 2 * m * n * k / rate
    return max(arithmetic, memory_seconds(hardware, num_bytes)) + hardware.op_overhead_s


def attention_seconds(
    hardware: Hardware, flops: float, seq_len: float, precision: str, part: float
) -> float:
    """Attention's products, which stay in the activations' format under fp8.

    Args:
        hardware: of the rank.
        flops: of the pass.
        seq_len: keys that a block of queries meets.
        precision: of the run.
        part: of a large matmul's rate, that attention's kernel reaches on long sequences.
    """
    peak = hardware.peak("bf16" if precision == "fp8" else precision)
    rate = peak * hardware.matmul_efficiency * part * seq_len / (seq_len + ATTENTION_HALF_LENGTH)
    return flops / rate + hardware.op_overhead_s


def memory_seconds(hardware: Hardware, num_bytes: float) -> float:
    """Bytes read and written by operations that do little else."""
    return num_bytes / (MEMORY_EFFICIENCY * hardware.memory_bytes_per_s)
