"""What the codecs' Triton kernels share: rows of 32 lanes, signs, scales.

The sum keeps the definition's order: a program walks the rows of 32 elements of its blocks, and
its 32 float64 lanes are folded in halves at the end (two terms a fold, so the order of a
reduction cannot show). Launches switch the fusing of multiply and add off: a fused one rounds once.
Letters: P = blocks of a program, L = 32 lanes.
"""

# Triton types its kernels as the functions they are written as, not as what a launch takes.
# pyright: reportArgumentType=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import triton
import triton.language as tl

# 8 blocks of 32 lanes are 2 elements a thread at 4 warps; a row of a block is one 128-byte line.
BLOCKS_PER_PROGRAM = 8
# Elements of a program of an elementwise kernel: 8 a thread at 4 warps.
ELEMENTS_PER_PROGRAM = 1024


@triton.jit
def fold(lanes, NUM_ROWS: tl.constexpr, HALF: tl.constexpr):
    """``[P, 2 HALF]`` to ``[P, HALF]``: lane l + lane l + HALF."""
    return tl.sum(tl.reshape(lanes, (NUM_ROWS, 2, HALF)), axis=1)


@triton.jit
def block_rms(lanes, count, P: tl.constexpr):
    """``[P, 32]`` float64 sums of squares to ``[P]`` scales; NaN where bad, 0 where empty."""
    total = tl.reshape(fold(fold(fold(fold(fold(lanes, P, 16), P, 8), P, 4), P, 2), P, 1), (P,))
    mean = total / tl.maximum(count, 1).to(tl.float64)
    scale = tl.sqrt(mean).to(tl.float32)
    return tl.where(scale < float("inf"), scale, float("nan"))  # False for NaN


@triton.jit
def signed(bits_ptr, at, valid, scale):
    """``scale`` where bit ``at`` of the packed signs is set, ``-scale`` elsewhere."""
    byte = tl.load(bits_ptr + at // 8, mask=valid, other=0).to(tl.int32)
    return tl.where((byte >> (at % 8).to(tl.int32)) & 1 != 0, scale, -scale)


@triton.jit
def store_signs(bits_ptr, start, row, positive, elements, P: tl.constexpr):
    """Pack a row's ``[P, 32]`` bools into 4 bytes a block, those below ``elements`` alone."""
    lane = tl.arange(0, 32)
    byte = tl.arange(0, 4)
    weighted = positive.to(tl.int32) << (lane % 8)[None, :]
    packed = tl.sum(tl.reshape(weighted, (P, 4, 8)), axis=2)  # [P, 4]
    stored = (row * 32 + byte * 8)[None, :] < elements[:, None]
    to = bits_ptr + (start // 8)[:, None] + (row * 4 + byte)[None, :]
    tl.store(to, packed.to(tl.uint8), mask=stored)
