"""onebit_compress_momentum in Triton: the bits of every other body, one launch a tensor.

Letters: P = blocks of a program, L = 32 lanes.
"""

# Triton types its kernels as the functions they are written as, not as what a launch takes.
# pyright: reportArgumentType=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN202, PLR0913

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcp_kernels.triton.codec_blocks import BLOCKS_PER_PROGRAM, block_rms, signed, store_signs


@triton.jit
def _carried(
    grad_ptr,
    factors_ptr,
    old_bits_ptr,
    error_ptr,
    inside,
    at,
    valid,
    kept,
    added,
    grad_scale,
    HAS_FACTORS: tl.constexpr,
):
    """``(beta1 * m + (1 - beta1) * g) + error`` of a row of each block."""
    g = tl.load(grad_ptr + inside, mask=valid, other=0.0).to(tl.float32) * grad_scale
    if HAS_FACTORS:
        g *= tl.load(factors_ptr + at, mask=valid, other=0.0).to(tl.float32)
    m = signed(old_bits_ptr, at, valid, kept[:, None])
    return (m + g * added) + tl.load(error_ptr + at, mask=valid, other=0.0)


@triton.jit
def _onebit_compress_momentum_kernel(
    grad_ptr,
    factors_ptr,
    old_bits_ptr,
    old_scales_ptr,
    error_ptr,
    bits_ptr,
    scales_ptr,
    numel,
    first_block,
    num_blocks,
    block_size,
    num_rows,
    beta1,
    added,
    grad_scale,
    P: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
):
    inner = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)  # block of the tensor
    exists = inner < num_blocks
    block = first_block + inner
    start = block * block_size
    count = tl.maximum(tl.minimum(block_size, numel - inner * block_size), 0)  # [P]
    count = tl.where(exists, count, 0)
    elements = tl.where(exists, block_size, 0)
    kept = beta1 * tl.load(old_scales_ptr + block, mask=exists, other=0.0)
    lane = tl.arange(0, 32)
    lanes = tl.zeros((P, 32), tl.float64)
    for row in range(num_rows):
        i = (row * 32 + lane)[None, :]
        valid = i < count[:, None]
        at = start[:, None] + i
        inside = (inner * block_size)[:, None] + i
        c = _carried(
            grad_ptr,
            factors_ptr,
            old_bits_ptr,
            error_ptr,
            inside,
            at,
            valid,
            kept,
            added,
            grad_scale,
            HAS_FACTORS,
        )
        c = tl.where(valid, c, 0.0)
        wide = c.to(tl.float64)
        lanes += wide * wide
        store_signs(bits_ptr, start, row, (c >= 0) & valid, elements, P)

    scale = block_rms(lanes, count, P)
    tl.store(scales_ptr + block, scale, mask=exists)
    finite = scale < float("inf")

    for row in range(num_rows):
        i = (row * 32 + lane)[None, :]
        valid = (i < count[:, None]) & finite[:, None]
        at = start[:, None] + i
        inside = (inner * block_size)[:, None] + i
        c = _carried(
            grad_ptr,
            factors_ptr,
            old_bits_ptr,
            error_ptr,
            inside,
            at,
            valid,
            kept,
            added,
            grad_scale,
            HAS_FACTORS,
        )
        tl.store(error_ptr + at, c - tl.where(c >= 0, scale[:, None], -scale[:, None]), mask=valid)


def onebit_compress_momentum(
    grads: Sequence[Tensor],
    bits: Tensor,
    scales: Tensor,
    error: Tensor,
    beta1: float,
    grad_scale: float,
    block_size: int,
    preconditioner: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The Triton body of ``onebit_compress_momentum``; arguments as there, checked before."""
    new_bits, new_scales = torch.empty_like(bits), torch.empty_like(scales)
    old_bits, old_scales = bits.reshape(-1), scales.reshape(-1)
    # A kernel takes a pointer even where it reads none.
    factors = old_scales if preconditioner is None else preconditioner
    first_block = 0
    for grad in grads:
        num_blocks = triton.cdiv(grad.numel(), block_size)
        if num_blocks:
            _onebit_compress_momentum_kernel[(triton.cdiv(num_blocks, BLOCKS_PER_PROGRAM),)](
                *(grad.reshape(-1), factors, old_bits, old_scales, error, new_bits, new_scales),
                *(grad.numel(), first_block, num_blocks, block_size, triton.cdiv(block_size, 32)),
                *(beta1, 1 - beta1, grad_scale),
                P=BLOCKS_PER_PROGRAM,
                HAS_FACTORS=preconditioner is not None,
                enable_fp_fusion=False,
            )
        first_block += num_blocks
    new_bits.view(-1)[first_block * (block_size // 8) :].zero_()
    new_scales.view(-1)[first_block:].zero_()
    return new_bits, new_scales
