"""rms_norm, add_rms_norm and their gradient in Triton: a row at a time in registers.

Forward is a program a row. Backward is a program for some rows in turn, which adds up its part of
the weight's gradient in registers; the parts are summed after it, in order.
Letters: N = rows, D = features.
"""

# Triton types its kernels as the functions they are written as, not as what a launch takes.
# pyright: reportArgumentType=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN202, PLR0913

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcp_kernels.ops._rows_check import compute_dtype

# Programs of a backward call: some for each multiprocessor of the largest GPUs, and few enough
# parts of the weight's gradient to sum.
MOST_PARTS = 512


@triton.jit
def _norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    sum_ptr,
    y_ptr,
    scale_ptr,
    width,
    eps,
    ADDS: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    valid = d < width
    at = row * width + d
    s = tl.load(x_ptr + at, mask=valid, other=0.0).to(COMPUTE)
    if ADDS:
        s += tl.load(residual_ptr + at, mask=valid, other=0.0).to(COMPUTE)
        rounded = s.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, rounded, mask=valid)
        s = rounded.to(COMPUTE)
    mean = tl.sum(s * s, axis=0) / width
    scale = 1.0 / tl.sqrt(mean + eps)
    weight = tl.load(weight_ptr + d, mask=valid, other=0.0).to(COMPUTE)
    tl.store(y_ptr + at, (s * scale * weight).to(y_ptr.dtype.element_ty), mask=valid)
    tl.store(scale_ptr + row, scale.to(COMPUTE))


@triton.jit
def _norm_bwd_kernel(
    dy_ptr,
    dsum_ptr,
    s_ptr,
    weight_ptr,
    scale_ptr,
    ds_ptr,
    parts_ptr,
    num_rows,
    rows_of_part,
    width,
    HAS_DSUM: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    valid = d < width
    weight = tl.load(weight_ptr + d, mask=valid, other=0.0).to(COMPUTE)
    dweight = tl.zeros([BLOCK], COMPUTE)
    first = part * rows_of_part
    for row in range(first, tl.minimum(first + rows_of_part, num_rows)):
        at = row * width + d
        dy = tl.load(dy_ptr + at, mask=valid, other=0.0).to(COMPUTE)
        s = tl.load(s_ptr + at, mask=valid, other=0.0).to(COMPUTE)
        scale = tl.load(scale_ptr + row)
        # One factor after the other: the cube alone leaves float32 before the square of s does.
        slope = tl.sum(dy * weight * s, axis=0) / width * scale * scale * scale
        scaled = dy * scale
        dweight += scaled * s
        ds = scaled * weight - s * slope
        if HAS_DSUM:
            ds += tl.load(dsum_ptr + at, mask=valid, other=0.0).to(COMPUTE)
        tl.store(ds_ptr + at, ds.to(ds_ptr.dtype.element_ty), mask=valid)
    tl.store(parts_ptr + part * width + d, dweight, mask=valid)


def _launch(x: Tensor) -> dict[str, object]:
    block = triton.next_power_of_2(x.shape[-1])
    return {
        "COMPUTE": tl.float64 if x.dtype == torch.float64 else tl.float32,
        "BLOCK": block,
        "num_warps": min(16, max(1, block // 256)),
    }


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dense = x.contiguous()
    y = torch.empty_like(dense)
    total = dense if residual is None else torch.empty_like(dense)
    scale = x.new_empty(x.shape[:-1], dtype=compute_dtype(x))
    if x.numel():
        _norm_kernel[(scale.numel(),)](
            *(dense, dense if residual is None else residual.contiguous(), weight.contiguous()),
            *(total, y, scale, x.shape[-1], eps),
            ADDS=residual is not None,
            **_launch(x),
        )
    return y, total, scale


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The Triton body of ``rms_norm``; arguments as there, checked before."""
    y, _, scale = _norm(x, None, weight, eps)
    return y, scale


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The Triton body of ``add_rms_norm``; arguments as there, checked before."""
    return _norm(x, residual, weight, eps)


def rms_norm_bwd(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The Triton body of ``rms_norm_bwd``; arguments as there, checked before."""
    dense, width = x.contiguous(), x.shape[-1]
    ds = torch.empty_like(dense)
    num_rows = scale.numel()
    if num_rows == 0:
        return ds, torch.zeros_like(weight)
    rows_of_part = triton.cdiv(num_rows, MOST_PARTS)
    num_parts = triton.cdiv(num_rows, rows_of_part)
    parts = x.new_empty(num_parts, width, dtype=scale.dtype)
    _norm_bwd_kernel[(num_parts,)](
        *(dy.contiguous(), dense if dsum is None else dsum.contiguous(), dense),
        *(weight.contiguous(), scale.contiguous(), ds, parts, num_rows, rows_of_part, width),
        HAS_DSUM=dsum is not None,
        **_launch(x),
    )
    return ds, parts.sum(0).to(weight.dtype)
