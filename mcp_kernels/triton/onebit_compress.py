"""onebit_compress and onebit_decompress in Triton: the bits of every other body.

Letters: P = blocks of a program, L = 32 lanes; codec_blocks.py tells how their sum keeps its order.
"""

# Triton types its kernels as the functions they are written as, not as what a launch takes.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcp_kernels.triton.codec_blocks import BLOCKS_PER_PROGRAM, block_rms, store_signs

BYTES_PER_PROGRAM = 512


@triton.jit
def _onebit_compress_kernel(  # noqa: ANN202
    x_ptr,  # noqa: ANN001
    error_ptr,  # noqa: ANN001
    bits_ptr,  # noqa: ANN001
    scales_ptr,  # noqa: ANN001
    numel,  # noqa: ANN001
    block_size,  # noqa: ANN001
    num_blocks,  # noqa: ANN001
    num_rows,  # noqa: ANN001
    P: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    start = block * block_size
    count = tl.maximum(tl.minimum(block_size, numel - start), 0)  # [P]
    lane = tl.arange(0, 32)
    lanes = tl.zeros((P, 32), tl.float64)
    for row in range(num_rows):
        i = (row * 32 + lane)[None, :]
        valid = i < count[:, None]
        at = start[:, None] + i
        x = tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
        c = x + tl.load(error_ptr + at, mask=valid, other=0.0)
        wide = c.to(tl.float64)
        lanes += wide * wide
        store_signs(bits_ptr, start, row, (c >= 0) & valid, count, P)

    scale = block_rms(lanes, count, P)
    tl.store(scales_ptr + block, scale, mask=block < num_blocks)
    finite = scale < float("inf")

    for row in range(num_rows):
        i = (row * 32 + lane)[None, :]
        valid = (i < count[:, None]) & finite[:, None]
        at = start[:, None] + i
        x = tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
        c = x + tl.load(error_ptr + at, mask=valid, other=0.0)
        sent = tl.where(c >= 0, scale[:, None], -scale[:, None])
        tl.store(error_ptr + at, c - sent, mask=valid)


@triton.jit
def _onebit_decompress_kernel(  # noqa: ANN202
    bits_ptr,  # noqa: ANN001
    scales_ptr,  # noqa: ANN001
    x_ptr,  # noqa: ANN001
    numel,  # noqa: ANN001
    block_size,  # noqa: ANN001
    BYTES: tl.constexpr,
):
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    inside = byte * 8 < numel
    signs = tl.load(bits_ptr + byte, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales_ptr + byte * 8 // block_size, mask=inside, other=0.0)
    bit = tl.arange(0, 8)
    positive = (signs[:, None] >> bit[None, :]) & 1
    at = (byte * 8)[:, None] + bit[None, :]
    value = tl.where(positive != 0, scale[:, None], -scale[:, None])
    tl.store(x_ptr + at, value, mask=at < numel)


def onebit_compress(x: Tensor, error: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """The Triton body of ``onebit_compress``; arguments as there, checked before."""
    numel = x.numel()
    flat = x.reshape(-1)
    num_blocks = triton.cdiv(numel, block_size)
    bits = torch.empty(triton.cdiv(numel, 8), dtype=torch.uint8, device=x.device)
    scales = torch.empty(num_blocks, dtype=torch.float32, device=x.device)
    if numel:
        grid = (triton.cdiv(num_blocks, BLOCKS_PER_PROGRAM),)
        num_rows = triton.cdiv(min(block_size, numel), 32)
        _onebit_compress_kernel[grid](
            *(flat, error, bits, scales, numel, block_size, num_blocks, num_rows),
            P=BLOCKS_PER_PROGRAM,
        )
    return bits, scales


def onebit_decompress(bits: Tensor, scales: Tensor, numel: int, block_size: int) -> Tensor:
    """The Triton body of ``onebit_decompress``; arguments as there, checked before."""
    x = torch.empty(numel, dtype=torch.float32, device=scales.device)
    if numel:
        grid = (triton.cdiv(bits.numel(), BYTES_PER_PROGRAM),)
        flat_bits, flat_scales = bits.reshape(-1), scales.reshape(-1)
        _onebit_decompress_kernel[grid](
            *(flat_bits, flat_scales, x, numel, block_size), BYTES=BYTES_PER_PROGRAM
        )
    return x
