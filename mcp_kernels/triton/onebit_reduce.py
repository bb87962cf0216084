"""onebit_reduce in Triton: the bits of every other body.

Letters: P = blocks of a program, L = 32 lanes, W = ranks.
"""

# Triton types its kernels as the functions they are written as, not as what a launch takes.
# pyright: reportArgumentType=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN202, PLR0913

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcp_kernels.triton.codec_blocks import BLOCKS_PER_PROGRAM, block_rms, signed, store_signs


@triton.jit
def _carried(
    bits_ptr, scales_ptr, error_ptr, block, at, valid, num_ranks, rank_bytes, num_blocks, share
):
    """The ranks' mean plus the error, of a row of each block."""
    exists = block < num_blocks
    scale = tl.load(scales_ptr + block, mask=exists, other=0.0)
    total = signed(bits_ptr, at, valid, scale[:, None])
    for _ in range(1, num_ranks):
        bits_ptr += rank_bytes
        scales_ptr += num_blocks
        scale = tl.load(scales_ptr + block, mask=exists, other=0.0)
        total += signed(bits_ptr, at, valid, scale[:, None])
    return total * share + tl.load(error_ptr + at, mask=valid, other=0.0)


@triton.jit
def _onebit_reduce_kernel(
    rank_bits_ptr,
    rank_scales_ptr,
    counts_ptr,
    error_ptr,
    bits_ptr,
    scales_ptr,
    numel,
    num_blocks,
    block_size,
    num_rows,
    num_ranks,
    rank_bytes,
    share,
    HAS_COUNTS: tl.constexpr,
    P: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    exists = block < num_blocks
    start = block * block_size
    elements = tl.maximum(tl.minimum(block_size, numel - start), 0)  # [P]
    count = elements
    if HAS_COUNTS:
        given = tl.load(counts_ptr + block, mask=exists, other=0).to(tl.int64)
        count = tl.maximum(tl.minimum(given, elements), 0)
    lane = tl.arange(0, 32)
    lanes = tl.zeros((P, 32), tl.float64)
    for row in range(num_rows):
        i = (row * 32 + lane)[None, :]
        valid = i < count[:, None]
        at = start[:, None] + i
        u = _carried(
            *(rank_bits_ptr, rank_scales_ptr, error_ptr, block, at, valid),
            *(num_ranks, rank_bytes, num_blocks, share),
        )
        u = tl.where(valid, u, 0.0)
        wide = u.to(tl.float64)
        lanes += wide * wide
        store_signs(bits_ptr, start, row, (u >= 0) & valid, elements, P)

    scale = block_rms(lanes, count, P)
    tl.store(scales_ptr + block, scale, mask=exists)
    finite = scale < float("inf")

    for row in range(num_rows):
        i = (row * 32 + lane)[None, :]
        valid = (i < count[:, None]) & finite[:, None]
        at = start[:, None] + i
        u = _carried(
            *(rank_bits_ptr, rank_scales_ptr, error_ptr, block, at, valid),
            *(num_ranks, rank_bytes, num_blocks, share),
        )
        tl.store(error_ptr + at, u - tl.where(u >= 0, scale[:, None], -scale[:, None]), mask=valid)


def onebit_reduce(
    bits: Tensor, scales: Tensor, server_error: Tensor, counts: Tensor | None, block_size: int
) -> tuple[Tensor, Tensor]:
    """The Triton body of ``onebit_reduce``; arguments as there, checked before."""
    numel, num_ranks = server_error.numel(), bits.shape[0]
    num_blocks, rank_bytes = scales.shape[1], bits.shape[1]
    new_bits = torch.empty(rank_bytes, dtype=torch.uint8, device=bits.device)
    new_scales = torch.empty(num_blocks, dtype=torch.float32, device=bits.device)
    if numel:
        _onebit_reduce_kernel[(triton.cdiv(num_blocks, BLOCKS_PER_PROGRAM),)](
            *(bits.contiguous(), scales.contiguous(), counts, server_error, new_bits, new_scales),
            *(numel, num_blocks, block_size, triton.cdiv(min(block_size, numel), 32)),
            *(num_ranks, rank_bytes, 1.0 / num_ranks),
            HAS_COUNTS=counts is not None,
            P=BLOCKS_PER_PROGRAM,
            enable_fp_fusion=False,
        )
    return new_bits, new_scales
