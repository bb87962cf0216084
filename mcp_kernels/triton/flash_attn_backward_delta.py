"""Delta of attention's backward: what every dS of a row is held against.

    delta = rowsum(P dP) - dlse          dP = (dO v^T) keep / (1 - p)

rowsum(P dP) is rowsum(dO out), which costs no product. But ``out`` was rounded, and in a 16-bit
type that rounding alone is as large an error of dQ and dK as their own: there P and dP are taken
again, in float32, and what a row's dS adds up to is 0 as it should be. Float32 takes ``out``.

Cost: 2 (D + E) flops a visible score in a 16-bit type, beside 10 (D + E) of the rest of backward;
bytes of dO and out in float32.

Source: Dao, "FlashAttention-2" (2023), section 3.2. Letters: see ``flash_attn_scores.py``.
"""

# ruff: noqa: ANN001, ANN202, PLR0913
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mcp_kernels.triton import flash_attn_config as config
from mcp_kernels.triton.flash_attn_config import Tile
from mcp_kernels.triton.flash_attn_launch import (
    Problem,
    pad,
    row_value_strides,
    strides,
    unit_stride,
)
from mcp_kernels.triton.flash_attn_scores import (
    FLOAT_BIAS,
    LOG2E,
    NO_BIAS,
    dot,
    dropout_keep,
    finish_scores,
    key_range,
    load_base,
    load_tile,
    probabilities,
    sequence,
    tile_of,
    tile_pointers,
)
from mcp_kernels.triton.launch import Launch

# Bytes are what bounds float32: at 64 columns a thread of 4 warps has 16 elements of each tensor.
_ROUNDED_ELEMENTS = 2048


@triton.jit
def _add_keys(
    delta, q, do, base, k_ptrs, v_ptrs, k_step, v_step, lo, hi, rows, diagonal, num_rows,
    num_keys, window, scales, bias_row, bias_key_stride, slope, rng_ptr, lane, keep_from,
    keep_factor, dims, value_dims,
    MASKED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add rowsum(P dP) of the keys lo..hi to delta."""
    for start in range(lo, hi, N):
        keys = start + tl.arange(0, N)
        step = tl.cast(start, tl.int64)
        k = load_tile(k_ptrs + step * k_step, keys, num_keys, dims, D, MASKED)
        s = dot(q, tl.trans(k), PRECISION)
        inside = (rows < num_rows)[:, None] & (keys < num_keys)[None, :]
        bias_ptrs = bias_row
        if BIAS != NO_BIAS:
            bias_ptrs = bias_row[:, None] + keys.to(tl.int64)[None, :] * bias_key_stride
        s, _squashed, visible = finish_scores(
            s, diagonal[:, None], keys[None, :], inside, window, scales, bias_ptrs, slope,
            MASKED, LEFT, RIGHT, BIAS, SOFTCAP, ALIBI,
        )  # fmt: skip
        p = probabilities(s, base[:, None], visible, MASKED, BIAS)
        v = load_tile(v_ptrs + step * v_step, keys, num_keys, value_dims, E, MASKED)
        dp = dot(do, tl.trans(v), PRECISION)
        if DROPOUT:
            keep = dropout_keep(rng_ptr, lane, rows[:, None], start, keep_from, M, N)
            dp = tl.where(keep, dp * keep_factor, 0.0)
        products = p * dp
        if MASKED:
            # A hidden value may be NaN, and 0 * NaN is NaN.
            products = tl.where(visible, products, 0.0)
        delta += tl.sum(products, 1)
    return delta


@triton.jit
def _minus_dlse(delta, dlse_ptr, dlse_row, dlse_stride, rows, lse, stored):
    """``delta - dlse``; a row that saw no key has a constant lse."""
    dlse_ptrs = dlse_ptr + dlse_row + rows.to(tl.int64) * dlse_stride
    dlse = tl.load(dlse_ptrs, mask=stored, other=0.0).to(tl.float32)
    return delta - tl.where(lse == float("-inf"), 0.0, dlse)


@triton.jit
def _flash_attn_delta_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dlse_ptr, lse_ptr, delta_ptr, bias_ptr, slopes_ptr, rng_ptr,
    cu_q_ptr, cu_k_ptr, tiles_ptr,
    q_strides, k_strides, v_strides, do_strides, dlse_strides, lse_strides, bias_strides,
    slope_strides,
    count, heads, group, num_rows, num_keys, num_tiles, window, scales, keep_from, keep_factor,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, TOP_LEFT: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    b, head, tile = tile_of(tl.program_id(0), tiles_ptr, num_tiles, heads, RIGHT, VARLEN)
    if b < 0:
        return
    row_base, key_base, num_rows, num_keys = sequence(
        b, cu_q_ptr, cu_k_ptr, num_rows, num_keys, VARLEN
    )
    first = tile * M
    rows = first + tl.arange(0, M)
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_E)
    offset = 0 if TOP_LEFT else num_keys - num_rows
    diagonal = rows + offset
    lane = b * 65536 + head

    own_rows = tl.arange(0, M)
    q_ptrs = tile_pointers(q_ptr, q_strides, b, row_base + first, head, own_rows, dims)
    q = load_tile(q_ptrs, rows, num_rows, dims, D, True)
    do_ptrs = tile_pointers(do_ptr, do_strides, b, row_base + first, head, own_rows, value_dims)
    do = load_tile(do_ptrs, rows, num_rows, value_dims, E, True)
    row_values = b.to(tl.int64) * lse_strides[0] + head.to(tl.int64) * lse_strides[1] + row_base
    base = load_base(lse_ptr + row_values, rows, num_rows, BIAS)
    size = tl.arange(0, N)
    k_ptrs = tile_pointers(k_ptr, k_strides, b, key_base, head // group, size, dims)
    v_ptrs = tile_pointers(v_ptr, v_strides, b, key_base, head // group, size, value_dims)
    k_step = tl.cast(k_strides[1], tl.int64)
    v_step = tl.cast(v_strides[1], tl.int64)
    bias_row = bias_ptr
    if BIAS != NO_BIAS:
        bias_row = bias_ptr + b.to(tl.int64) * bias_strides[0] + head.to(tl.int64) * bias_strides[1]
        bias_row += rows.to(tl.int64) * bias_strides[2]
    slope = 0.0
    if ALIBI:
        own = tl.minimum(b, count - 1)
        slope = tl.load(slopes_ptr + own * slope_strides[0] + head * slope_strides[1])
        slope = slope.to(tl.float32) * (1.0 if BIAS == FLOAT_BIAS else LOG2E)

    delta = tl.zeros((M,), tl.float32)
    last = tl.minimum(first + M, num_rows) - 1
    lo, full_lo, full_hi, hi = key_range(first, last, offset, num_keys, window, N, LEFT, RIGHT)
    if BIAS != NO_BIAS:
        full_lo = lo
        full_hi = lo
    if LEFT:
        delta = _add_keys(
            delta, q, do, base, k_ptrs, v_ptrs, k_step, v_step, lo, tl.minimum(full_lo, hi),
            rows, diagonal, num_rows, num_keys, window, scales, bias_row, bias_strides[3], slope,
            rng_ptr, lane, keep_from, keep_factor, dims, value_dims, True, D, E, M, N, LEFT, RIGHT,
            BIAS, SOFTCAP, ALIBI, DROPOUT, PRECISION,
        )  # fmt: skip
    if BIAS == NO_BIAS:
        delta = _add_keys(
            delta, q, do, base, k_ptrs, v_ptrs, k_step, v_step, full_lo, full_hi,
            rows, diagonal, num_rows, num_keys, window, scales, bias_row, bias_strides[3], slope,
            rng_ptr, lane, keep_from, keep_factor, dims, value_dims, False, D, E, M, N, LEFT,
            RIGHT, BIAS, SOFTCAP, ALIBI, DROPOUT, PRECISION,
        )  # fmt: skip
    delta = _add_keys(
        delta, q, do, base, k_ptrs, v_ptrs, k_step, v_step, full_hi, hi,
        rows, diagonal, num_rows, num_keys, window, scales, bias_row, bias_strides[3], slope,
        rng_ptr, lane, keep_from, keep_factor, dims, value_dims, True, D, E, M, N, LEFT, RIGHT,
        BIAS, SOFTCAP, ALIBI, DROPOUT, PRECISION,
    )  # fmt: skip

    stored = rows < num_rows
    if HAS_DLSE:
        dlse_row = b.to(tl.int64) * dlse_strides[0] + head.to(tl.int64) * dlse_strides[1]
        dlse_row += row_base * dlse_strides[2]
        lse = tl.load(lse_ptr + row_values + rows, mask=stored, other=0.0)
        delta = _minus_dlse(delta, dlse_ptr, dlse_row, dlse_strides[2], rows, lse, stored)
    tl.store(delta_ptr + row_values + rows, delta, mask=stored)


@triton.jit
def _flash_attn_delta_of_out_kernel(
    do_ptr, out_ptr, dlse_ptr, lse_ptr, delta_ptr, do_strides, out_strides, dlse_strides,
    lse_strides, heads, num_rows, num_tiles,
    E: tl.constexpr, BLOCK_E: tl.constexpr, M: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) % num_tiles
    head = tl.program_id(0) // num_tiles % heads
    b = tl.program_id(0) // num_tiles // heads
    rows = tile * M + tl.arange(0, M)
    dims = tl.arange(0, BLOCK_E)
    zero = tl.full((), 0, tl.int64)
    do_ptrs = tile_pointers(do_ptr, do_strides, b, zero, head, rows, dims)
    do = load_tile(do_ptrs, rows, num_rows, dims, E, True).to(tl.float32)
    out_ptrs = tile_pointers(out_ptr, out_strides, b, zero, head, rows, dims)
    out = load_tile(out_ptrs, rows, num_rows, dims, E, True).to(tl.float32)
    delta = tl.sum(do * out, 1)
    lse_row = b.to(tl.int64) * lse_strides[0] + head.to(tl.int64) * lse_strides[1]
    stored = rows < num_rows
    if HAS_DLSE:
        dlse_row = b.to(tl.int64) * dlse_strides[0] + head.to(tl.int64) * dlse_strides[1]
        lse = tl.load(lse_ptr + lse_row + rows, mask=stored, other=0.0)
        delta = _minus_dlse(delta, dlse_ptr, dlse_row, dlse_strides[2], rows, lse, stored)
    tl.store(delta_ptr + lse_row + rows, delta, mask=stored)


def delta_launch(
    problem: Problem, dout: Tensor, out: Tensor, dlse: Tensor | None, lse: Tensor, delta: Tensor
) -> Launch:
    """How ``delta`` (as lse) is filled."""
    dlse_strides = (0, 0, 0) if dlse is None else (*row_value_strides(dlse), dlse.stride(-1))
    args: dict[str, Any] = {
        "do_ptr": dout,
        "dlse_ptr": dlse,
        "lse_ptr": lse,
        "delta_ptr": delta,
        "do_strides": strides(dout),
        "dlse_strides": dlse_strides,
        "lse_strides": row_value_strides(lse),
    }
    constants: dict[str, Any] = {"HAS_DLSE": dlse is not None}
    if problem.q.element_size() > 2:
        return _delta_of_out_launch(unit_stride(out), args, constants)
    wish = config.delta_tile(
        problem.width, problem.q.element_size(), problem.is_plain, problem.chip
    )
    tile = config.shrink(wish, problem.rows, problem.keys)
    num_tiles, tiles = triton.cdiv(problem.rows, tile.rows), None
    if problem.sequences is not None:
        sequences = problem.sequences
        tiles = sequences.tiles(sequences.cu_seqlens_q, problem.rows, tile.rows)
        num_tiles = tiles.shape[1]
    args |= {
        **problem.args(),
        "tiles_ptr": tiles,
        "num_tiles": num_tiles,
        "keep_factor": problem.keep_factor(),
    }
    constants |= {**problem.constants(), "M": tile.rows, "N": tile.keys}
    programs = num_tiles * problem.heads * problem.batch if delta.numel() else 0
    return Launch(_flash_attn_delta_kernel, programs, args, constants, tile)


def _delta_of_out_launch(out: Tensor, args: dict[str, Any], constants: dict[str, Any]) -> Launch:
    """The same from ``out``; with varlen all sequences are one."""
    rows, heads, width = out.shape[-3:]
    block = max(1, _ROUNDED_ELEMENTS // pad(width))
    num_tiles = triton.cdiv(rows, block)
    batch = out.shape[0] if out.dim() == 4 else 1
    args = {
        **args,
        "out_ptr": out,
        "out_strides": strides(out),
        "heads": heads,
        "num_rows": rows,
        "num_tiles": num_tiles,
    }
    constants = {**constants, "E": width, "BLOCK_E": pad(width), "M": block}
    programs = num_tiles * heads * batch
    return Launch(_flash_attn_delta_of_out_kernel, programs, args, constants, Tile(block, 0, 4, 1))
