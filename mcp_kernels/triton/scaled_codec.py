"""int8, int4 and fp8 in Triton: the bits of every other body.

Letters: P = blocks of a program, L = 32 lanes, W = ranks. CODEC: 0 int8, 1 int4, 2 fp8.
"""

# Triton types its kernels as the functions they are written as, not as what a launch takes.
# pyright: reportArgumentType=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN202, PLR0913

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcp_kernels.triton.codec_blocks import BLOCKS_PER_PROGRAM, ELEMENTS_PER_PROGRAM


@triton.jit
def _encode(units, CODEC: tl.constexpr):
    """Values in ``[-largest, largest]`` to codes, int32, to nearest, ties to even."""
    if CODEC == 2:
        bits = units.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # Below 2^-6 the step is 2^-9, which is that of a float32 at 2^14: adding 2^14 rounds to it.
        anchored = magnitude.to(tl.float32, bitcast=True) + 16384.0
        small = anchored.to(tl.int32, bitcast=True) - 0x46800000
        odd = (magnitude >> 20) & 1
        normal = (magnitude + odd + (0x7FFFF - (120 << 23))) >> 20
        code = tl.where(magnitude < (121 << 23), small, normal) | ((bits >> 24) & 0x80)
    else:
        # Adding 1.5 * 2^23, whose step is 1, rounds to a whole number; the rest is the number.
        rounded = (units + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
        code = rounded & (15 if CODEC == 1 else 255)
    return code


@triton.jit
def _decode(code, CODEC: tl.constexpr):
    """Codes, int32, to the float32 that they stand for."""
    if CODEC == 2:
        magnitude = code & 0x7F
        small = magnitude.to(tl.float32) * 0.001953125
        normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        value = tl.where(magnitude < 8, small, normal)
        signed = tl.where(code >= 128, -value, value)
        value = tl.where(magnitude == 0x7F, float("nan"), signed)
    elif CODEC == 1:
        value = ((code ^ 8) - 8).to(tl.float32)
    else:
        value = ((code ^ 128) - 128).to(tl.float32)
    return value


@triton.jit
def _load_codes(codes_ptr, at, valid, CODEC: tl.constexpr):
    """The code of element ``at``, int32."""
    if CODEC == 1:
        byte = tl.load(codes_ptr + at // 2, mask=valid, other=0).to(tl.int32)
        code = (byte >> ((at % 2) * 4).to(tl.int32)) & 15
    else:
        code = tl.load(codes_ptr + at, mask=valid, other=0).to(tl.int32)
    return code


@triton.jit
def _store_codes(codes_ptr, start, row, code, elements, CODEC: tl.constexpr, P: tl.constexpr):
    """A row's ``[P, 32]`` codes, those below ``elements`` alone; what is not there is 0."""
    if CODEC == 1:
        pair = tl.arange(0, 16)
        shifted = code << ((tl.arange(0, 32) % 2) * 4)[None, :]
        packed = tl.sum(tl.reshape(shifted, (P, 16, 2)), axis=2)
        stored = (row * 32 + pair * 2)[None, :] < elements[:, None]
        to = codes_ptr + (start // 2)[:, None] + (row * 16 + pair)[None, :]
        tl.store(to, packed.to(tl.uint8), mask=stored)
    else:
        i = (row * 32 + tl.arange(0, 32))[None, :]
        to = codes_ptr + start[:, None] + i
        tl.store(to, code.to(tl.uint8), mask=i < elements[:, None])


@triton.jit
def _carried(
    x_ptr, rank_scales_ptr, error_ptr, block, at, valid, num_ranks, rank_bytes, num_blocks, share,
    CODEC: tl.constexpr, REDUCE: tl.constexpr,
):  # fmt: skip
    """``x + error``, or the mean of the ranks' codes plus the error, of a row of each block."""
    if REDUCE:
        exists = block < num_blocks
        scale = tl.load(rank_scales_ptr + block, mask=exists, other=0.0)
        total = _decode(_load_codes(x_ptr, at, valid, CODEC), CODEC) * scale[:, None]
        for _ in range(1, num_ranks):
            x_ptr += rank_bytes
            rank_scales_ptr += num_blocks
            scale = tl.load(rank_scales_ptr + block, mask=exists, other=0.0)
            total += _decode(_load_codes(x_ptr, at, valid, CODEC), CODEC) * scale[:, None]
        x = total * share
    else:
        x = tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
    return x + tl.load(error_ptr + at, mask=valid, other=0.0)


@triton.jit
def _bad_ranks(rank_scales_ptr, block, num_ranks, num_blocks):
    """``[P]``: how many ranks' scales are not finite."""
    bad = tl.zeros_like(block)
    for _ in range(num_ranks):
        scale = tl.load(rank_scales_ptr + block, mask=block < num_blocks, other=0.0)
        bad += tl.where(tl.abs(scale) < float("inf"), 0, 1)
        rank_scales_ptr += num_blocks
    return bad


@triton.jit
def _scaled_code_kernel(
    x_ptr,
    rank_scales_ptr,
    counts_ptr,
    error_ptr,
    codes_ptr,
    scales_ptr,
    numel,
    num_blocks,
    block_size,
    num_rows,
    num_ranks,
    rank_bytes,
    share,
    largest,
    CODEC: tl.constexpr,
    REDUCE: tl.constexpr,
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
    highest = tl.zeros((P, 32), tl.int32)  # magnitudes as bits: a NaN is above infinity
    for row in range(num_rows):
        i = (row * 32 + lane)[None, :]
        valid = i < count[:, None]
        c = _carried(
            *(x_ptr, rank_scales_ptr, error_ptr, block, start[:, None] + i, valid),
            *(num_ranks, rank_bytes, num_blocks, share, CODEC, REDUCE),
        )
        magnitude = tl.where(valid, c, 0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        highest = tl.maximum(highest, magnitude)

    amax = tl.cast(tl.max(highest, axis=1), tl.float32, bitcast=True)
    scale = tl.div_rn(amax, tl.zeros_like(amax) + largest)
    good = scale * largest < float("inf")  # False for NaN
    if REDUCE:
        good = good & ((_bad_ranks(rank_scales_ptr, block, num_ranks, num_blocks) == 0)
                       | (count == 0))  # fmt: skip
    scale = tl.where(good, scale, float("nan"))
    tl.store(scales_ptr + block, scale, mask=exists)

    has_scale = (scale > 0)[:, None]
    divisor = tl.where(scale > 0, scale, 1.0)[:, None]
    for row in range(num_rows):
        i = (row * 32 + lane)[None, :]
        valid = i < count[:, None]
        at = start[:, None] + i
        c = _carried(
            *(x_ptr, rank_scales_ptr, error_ptr, block, at, valid),
            *(num_ranks, rank_bytes, num_blocks, share, CODEC, REDUCE),
        )
        units = tl.div_rn(c, tl.zeros_like(c) + divisor)
        units = tl.where(units > largest, largest, tl.where(units < -largest, -largest, units))
        code = tl.where(has_scale & valid, _encode(units, CODEC), 0)
        _store_codes(codes_ptr, start, row, code, elements, CODEC, P)
        sent = tl.where(has_scale, _decode(code, CODEC) * divisor, 0.0)
        tl.store(error_ptr + at, c - sent, mask=valid & good[:, None])


@triton.jit
def _scaled_decompress_kernel(
    codes_ptr, scales_ptr, x_ptr, numel, block_size, CODEC: tl.constexpr, ELEMENTS: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    valid = at < numel
    scale = tl.load(scales_ptr + at // block_size, mask=valid, other=0.0)
    value = _decode(_load_codes(codes_ptr, at, valid, CODEC), CODEC)
    good = (tl.abs(scale) < float("inf")) & (value == value)
    tl.store(x_ptr + at, tl.where(good, value * scale, float("nan")), mask=valid)


@dataclass(frozen=True)
class TritonCodec:
    """The Triton bodies of one codec's three ops; arguments as there, checked before."""

    number: int
    largest: float
    bits_each: int

    def compress(self, x: Tensor, error: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        """The body of ``<codec>_compress``."""
        return self._code((x.reshape(-1), None, None), error, block_size, 1, 0)

    def reduce(
        self,
        codes: Tensor,
        scales: Tensor,
        server_error: Tensor,
        counts: Tensor | None,
        block_size: int,
    ) -> tuple[Tensor, Tensor]:
        """The body of ``<codec>_reduce``."""
        given = (codes.contiguous(), scales.contiguous(), counts)
        return self._code(given, server_error, block_size, *codes.shape)

    def decompress(self, codes: Tensor, scales: Tensor, numel: int, block_size: int) -> Tensor:
        """The body of ``<codec>_decompress``."""
        x = torch.empty(numel, dtype=torch.float32, device=scales.device)
        if numel:
            _scaled_decompress_kernel[(triton.cdiv(numel, ELEMENTS_PER_PROGRAM),)](
                *(codes.reshape(-1), scales.reshape(-1), x, numel, block_size),
                CODEC=self.number,
                ELEMENTS=ELEMENTS_PER_PROGRAM,
            )
        return x

    def _code(
        self,
        given: tuple[Tensor, Tensor | None, Tensor | None],
        error: Tensor,
        block_size: int,
        num_ranks: int,
        rank_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        """Codes of ``x + error``, or of the mean of ranks that ``given`` holds, with scales."""
        numel, num_blocks = error.numel(), triton.cdiv(error.numel(), block_size)
        num_bytes = triton.cdiv(numel * self.bits_each, 8)
        codes = torch.empty(num_bytes, dtype=torch.uint8, device=error.device)
        scales = torch.empty(num_blocks, dtype=torch.float32, device=error.device)
        if numel:
            _scaled_code_kernel[(triton.cdiv(num_blocks, BLOCKS_PER_PROGRAM),)](
                *(*given, error, codes, scales),
                *(numel, num_blocks, block_size, triton.cdiv(min(block_size, numel), 32)),
                *(num_ranks, rank_bytes, 1.0 / num_ranks, self.largest),
                CODEC=self.number,
                REDUCE=given[1] is not None,
                HAS_COUNTS=given[2] is not None,
                P=BLOCKS_PER_PROGRAM,
                enable_fp_fusion=False,
            )
        return codes, scales


INT8 = TritonCodec(number=0, largest=127.0, bits_each=8)
INT4 = TritonCodec(number=1, largest=7.0, bits_each=4)
FP8 = TritonCodec(number=2, largest=448.0, bits_each=8)

int8_compress, int8_decompress, int8_reduce = INT8.compress, INT8.decompress, INT8.reduce
int4_compress, int4_decompress, int4_reduce = INT4.compress, INT4.decompress, INT4.reduce
fp8_compress, fp8_decompress, fp8_reduce = FP8.compress, FP8.decompress, FP8.reduce
