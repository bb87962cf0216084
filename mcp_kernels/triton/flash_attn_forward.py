"""The forward kernel of attention: online softmax, one tile of query rows a program.

    S   = scale q k^T, finished as in flash_attn_scores.py
    m'  = max(m, max_j S)      l' = l 2^(m - m') + sum_j 2^(S - m')
    O'  = O 2^(m - m') + (2^(S - m') keep) v
    out = O / (l (1 - p))      lse = m ln 2 + ln l

A sink is where m and l start from: m = sink, l = 1. A row that sees no key keeps l = 0. Only tiles
at the edge of what is visible are masked.

Source: Dao, "FlashAttention-2" (2023), section 3.1. Letters: see ``flash_attn_scores.py``.
"""

# ruff: noqa: ANN001, ANN202, E741, PLR0913, SIM108
# pyright: reportPossiblyUnboundVariable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcp_kernels.triton import flash_attn_config as config
from mcp_kernels.triton.flash_attn_launch import Problem, row_value_strides, strides
from mcp_kernels.triton.flash_attn_scores import (
    FLOAT_BIAS,
    LN2,
    LOG2E,
    NO_BIAS,
    dot,
    dot_add,
    dropout_keep,
    exponential,
    finish_scores,
    finite_rows,
    key_range,
    load_rows,
    load_tile,
    narrow,
    sequence,
    tile_of,
    tile_pointers,
)
from mcp_kernels.triton.launch import Launch


@triton.jit
def _attend(
    o, m, l, q, k_ptrs, v_ptrs, k_step, v_step, lo, hi, rows, diagonal, num_rows, num_keys, window,
    scales, bias_row, bias_key_stride, slope, rng_ptr, lane, keep_from, dims, value_dims,
    MASKED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, DROPOUT: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the keys lo..hi into (o, m, l)."""
    for start in range(lo, hi, N):
        keys = start + tl.arange(0, N)
        step = tl.cast(start, tl.int64)
        if MASKED:
            v_good = finite_rows(v_ptrs + step * v_step, keys, num_keys, value_dims, E)
        k = load_tile(k_ptrs + step * k_step, keys, num_keys, dims, D, MASKED)
        s = dot(q, tl.trans(k), PRECISION)
        inside = (rows < num_rows)[:, None] & (keys < num_keys)[None, :]
        if FOLD:
            # One fused multiply-add a score: the maximum is taken before the scale.
            visible = inside
            if MASKED:
                if LEFT:
                    visible = visible & (keys[None, :] >= diagonal[:, None] - window[0])
                if RIGHT:
                    visible = visible & (keys[None, :] <= diagonal[:, None] + window[1])
                s = tl.where(visible, s, float("-inf"))
            new_m = tl.maximum(m, tl.max(s, 1) * scales[0])
        else:
            bias_ptrs = bias_row
            if BIAS != NO_BIAS:
                bias_ptrs = bias_row[:, None] + keys.to(tl.int64)[None, :] * bias_key_stride
            s, _squashed, visible = finish_scores(
                s, diagonal[:, None], keys[None, :], inside, window, scales, bias_ptrs, slope,
                MASKED, LEFT, RIGHT, BIAS, SOFTCAP, ALIBI,
            )  # fmt: skip
            new_m = tl.maximum(m, tl.max(s, 1))
        # A row that has seen nothing yet: exp(-inf - 0) is 0 where exp(-inf + inf) is NaN.
        base = tl.where(new_m == float("-inf"), 0.0, new_m)
        if FOLD:
            p = tl.exp2(s * scales[0] - base[:, None])
        else:
            p = exponential(s - base[:, None], BIAS)
        decay = exponential(m - base, BIAS)
        l = l * decay + tl.sum(p, 1)
        if DROPOUT:
            keep = dropout_keep(rng_ptr, lane, rows[:, None], start, keep_from, M, N)
            p = tl.where(keep, p, 0.0)
        if MASKED:
            v = load_rows(v_ptrs + step * v_step, v_good, value_dims, E)
            p = tl.where(visible & ~v_good[None, :], float("nan"), p)
        else:
            v = load_tile(v_ptrs + step * v_step, keys, num_keys, value_dims, E, False)
        o = dot_add(narrow(p, v.dtype, PRECISION), v, o * decay[:, None], PRECISION)
        m = new_m
    return o, m, l


@triton.jit
def _flash_attn_fwd_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, slopes_ptr, sink_ptr, rng_ptr, out_ptr, lse_ptr,
    cu_q_ptr, cu_k_ptr, tiles_ptr,
    q_strides, k_strides, v_strides, bias_strides, slope_strides, out_strides, lse_strides,
    count, heads, group, num_rows, num_keys, num_tiles, window, scales, keep_from, keep_factor,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, TOP_LEFT: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    SINK: tl.constexpr, DROPOUT: tl.constexpr, FOLD: tl.constexpr, VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
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
    unit = 1.0 if BIAS == FLOAT_BIAS else LOG2E

    q_ptrs = tile_pointers(q_ptr, q_strides, b, row_base + first, head, tl.arange(0, M), dims)
    q = load_tile(q_ptrs, rows, num_rows, dims, D, True)
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
        slope = slope.to(tl.float32) * unit

    m = tl.full((M,), float("-inf"), tl.float32)
    l = tl.zeros((M,), tl.float32)
    if SINK:
        sink = tl.load(sink_ptr + head).to(tl.float32) * unit
        sink = tl.where(b < count, sink, float("-inf"))  # slack rows have none
        m = tl.zeros((M,), tl.float32) + sink
        l += tl.where(sink > float("-inf"), 1.0, 0.0)
    o = tl.zeros((M, BLOCK_E), tl.float32)

    last = tl.minimum(first + M, num_rows) - 1
    lo, full_lo, full_hi, hi = key_range(first, last, offset, num_keys, window, N, LEFT, RIGHT)
    if BIAS != NO_BIAS:
        full_lo = lo
        full_hi = lo
    if LEFT:
        o, m, l = _attend(
            o, m, l, q, k_ptrs, v_ptrs, k_step, v_step, lo, tl.minimum(full_lo, hi), rows, diagonal,
            num_rows, num_keys, window, scales, bias_row, bias_strides[3], slope, rng_ptr,
            lane, keep_from, dims, value_dims, True, D, E, M, N, LEFT, RIGHT, BIAS,
            SOFTCAP, ALIBI, DROPOUT, FOLD, PRECISION,
        )  # fmt: skip
    if BIAS == NO_BIAS:
        o, m, l = _attend(
            o, m, l, q, k_ptrs, v_ptrs, k_step, v_step, full_lo, full_hi, rows, diagonal,
            num_rows, num_keys, window, scales, bias_row, bias_strides[3], slope, rng_ptr,
            lane, keep_from, dims, value_dims, False, D, E, M, N, LEFT, RIGHT, BIAS,
            SOFTCAP, ALIBI, DROPOUT, FOLD, PRECISION,
        )  # fmt: skip
    o, m, l = _attend(
        o, m, l, q, k_ptrs, v_ptrs, k_step, v_step, full_hi, hi, rows, diagonal,
        num_rows, num_keys, window, scales, bias_row, bias_strides[3], slope, rng_ptr,
        lane, keep_from, dims, value_dims, True, D, E, M, N, LEFT, RIGHT, BIAS,
        SOFTCAP, ALIBI, DROPOUT, FOLD, PRECISION,
    )  # fmt: skip

    o *= (keep_factor / tl.where(l == 0.0, 1.0, l))[:, None]
    out_ptrs = tile_pointers(
        out_ptr, out_strides, b, row_base + first, head, tl.arange(0, M), value_dims
    )
    stored = (rows < num_rows)[:, None] & (value_dims < E)[None, :]
    tl.store(out_ptrs, narrow(o, out_ptr.dtype.element_ty, PRECISION), mask=stored)
    lse = m * (LN2 if BIAS != FLOAT_BIAS else 1.0) + tl.log(tl.where(l == 0.0, 1.0, l))
    lse = tl.where(l == 0.0, float("-inf"), lse)
    lse_row = lse_ptr + b.to(tl.int64) * lse_strides[0] + head.to(tl.int64) * lse_strides[1]
    tl.store(lse_row + row_base + rows, lse, mask=rows < num_rows)


def forward_launch(problem: Problem, out: Tensor, lse: Tensor) -> Launch:
    """How ``out`` (as q, with E columns) and ``lse`` (float32) are filled."""
    wish = config.forward_tile(
        problem.width,
        problem.q.element_size(),
        problem.is_plain,
        problem.slopes is not None,
        problem.chip,
    )
    tile = config.shrink(wish, problem.rows, problem.keys)
    num_tiles, tiles = triton.cdiv(problem.rows, tile.rows), None
    if problem.sequences is not None:
        sequences = problem.sequences
        tiles = sequences.tiles(sequences.cu_seqlens_q, problem.rows, tile.rows)
        num_tiles = tiles.shape[1]
    args = {
        **problem.args(),
        "sink_ptr": problem.sink,
        "out_ptr": out,
        "lse_ptr": lse,
        "tiles_ptr": tiles,
        "out_strides": strides(out),
        "lse_strides": row_value_strides(lse),
        "num_tiles": num_tiles,
        "keep_factor": problem.keep_factor(),
    }
    fold = problem.options.softmax_scale > 0 and problem.options.softcap == 0
    constants = {
        **problem.constants(),
        "M": tile.rows,
        "N": tile.keys,
        "SINK": problem.sink is not None,
        "FOLD": fold and problem.bias is None and problem.slopes is None,
    }
    programs = num_tiles * problem.heads * problem.batch if lse.numel() else 0
    return Launch(_flash_attn_fwd_kernel, programs, args, constants, tile)


def run_forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """(out, lse) as the op returns them."""
    q, v = problem.q, problem.v
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    shape = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
    lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    forward_launch(problem, out, lse).run(q.device)
    return out, lse
