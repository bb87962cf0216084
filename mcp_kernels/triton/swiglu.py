"""swiglu and its gradient in Triton: elements are read once and written once."""

# Triton types its kernels as the functions they are written as, not as what a launch takes.
# pyright: reportArgumentType=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# 8 elements a thread of 4 warps: two 16-byte loads of bfloat16's and four of float32's tensors.
ELEMENTS = 1024


@triton.jit
def _sigmoid(x):
    """Sigma and 1 - sigma, neither taken from the other."""
    e = tl.exp(-tl.abs(x))
    large = 1.0 / (1.0 + e)
    small = e * large
    return tl.where(x < 0, small, large), tl.where(x < 0, large, small)


@triton.jit
def _swiglu_kernel(gate_ptr, up_ptr, y_ptr, numel, COMPUTE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = i < numel
    gate = tl.load(gate_ptr + i, mask=valid, other=0.0).to(COMPUTE)
    up = tl.load(up_ptr + i, mask=valid, other=0.0).to(COMPUTE)
    sigma, _ = _sigmoid(gate)
    tl.store(y_ptr + i, (gate * sigma * up).to(y_ptr.dtype.element_ty), mask=valid)


@triton.jit
def _swiglu_bwd_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    numel,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = i < numel
    dy = tl.load(dy_ptr + i, mask=valid, other=0.0).to(COMPUTE)
    gate = tl.load(gate_ptr + i, mask=valid, other=0.0).to(COMPUTE)
    up = tl.load(up_ptr + i, mask=valid, other=0.0).to(COMPUTE)
    sigma, rest = _sigmoid(gate)
    tl.store(dup_ptr + i, (dy * (gate * sigma)).to(dup_ptr.dtype.element_ty), mask=valid)
    dgate = dy * up * (sigma * (1.0 + gate * rest))
    tl.store(dgate_ptr + i, dgate.to(dgate_ptr.dtype.element_ty), mask=valid)


def _launch(gate: Tensor) -> dict[str, object]:
    compute = tl.float64 if gate.dtype == torch.float64 else tl.float32
    return {"COMPUTE": compute, "BLOCK": ELEMENTS}


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The Triton body of ``swiglu``; arguments as there, checked before."""
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    if numel := gate.numel():
        grid = (triton.cdiv(numel, ELEMENTS),)
        _swiglu_kernel[grid](gate, up, y, numel, **_launch(gate))
    return y


def swiglu_bwd(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The Triton body of ``swiglu_bwd``; arguments as there, checked before."""
    dy, gate, up = dy.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    if numel := gate.numel():
        grid = (triton.cdiv(numel, ELEMENTS),)
        _swiglu_bwd_kernel[grid](dy, gate, up, dgate, dup, numel, **_launch(gate))
    return dgate, dup
