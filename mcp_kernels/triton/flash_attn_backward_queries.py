"""The dQ kernel of attention: one tile of query rows a program, walking over the keys it sees.

    dQ = scale sum_keys (dS (1 - tanh^2)) k

with dS as in ``flash_attn_backward_keys.py``. Recomputing S and dP here costs two products more
than adding to dQ from there, and needs no atomics: the same bits every time.

Source: Dao, "FlashAttention-2" (2023), section 3.2. Letters: see ``flash_attn_scores.py``.
"""

# ruff: noqa: ANN001, ANN202, PLR0913
# pyright: reportPossiblyUnboundVariable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mcp_kernels.triton import flash_attn_config as config
from mcp_kernels.triton.flash_attn_launch import Problem, row_value_strides, strides
from mcp_kernels.triton.flash_attn_scores import (
    FLOAT_BIAS,
    LOG2E,
    NO_BIAS,
    dot,
    dot_add,
    dropout_keep,
    finish_scores,
    finite_rows,
    key_range,
    load_base,
    load_rows,
    load_tile,
    narrow,
    probabilities,
    score_gradients,
    sequence,
    tile_of,
    tile_pointers,
)
from mcp_kernels.triton.launch import Launch


@triton.jit
def _walk_keys(
    dq, q, do, base, delta, k_ptrs, v_ptrs, k_step, v_step, lo, hi, rows, diagonal, num_rows,
    num_keys, window, scales, bias_row, bias_key_stride, slope, rng_ptr, lane, keep_from,
    keep_factor, dims, value_dims,
    MASKED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the keys lo..hi give to dq."""
    for start in range(lo, hi, N):
        keys = start + tl.arange(0, N)
        step = tl.cast(start, tl.int64)
        if MASKED:
            k_good = finite_rows(k_ptrs + step * k_step, keys, num_keys, dims, D)
            k = load_rows(k_ptrs + step * k_step, k_good, dims, D)
        else:
            k = load_tile(k_ptrs + step * k_step, keys, num_keys, dims, D, False)
        s = dot(q, tl.trans(k), PRECISION)
        inside = (rows < num_rows)[:, None] & (keys < num_keys)[None, :]
        bias_ptrs = bias_row
        if BIAS != NO_BIAS:
            bias_ptrs = bias_row[:, None] + keys.to(tl.int64)[None, :] * bias_key_stride
        s, squashed, visible = finish_scores(
            s, diagonal[:, None], keys[None, :], inside, window, scales, bias_ptrs, slope,
            MASKED, LEFT, RIGHT, BIAS, SOFTCAP, ALIBI,
        )  # fmt: skip
        # A key past the end has score 0: exp(0 - lse) overflows where lse is very negative.
        p = probabilities(s, base[:, None], visible, MASKED, BIAS)
        v = load_tile(v_ptrs + step * v_step, keys, num_keys, value_dims, E, MASKED)
        dp = dot(do, tl.trans(v), PRECISION)
        if DROPOUT:
            keep = dropout_keep(rng_ptr, lane, rows[:, None], start, keep_from, M, N)
            dp = tl.where(keep, dp * keep_factor, 0.0)
        ds = score_gradients(p, dp, delta[:, None], visible, MASKED)
        if SOFTCAP:
            ds *= 1.0 - squashed * squashed
        if MASKED:
            ds = tl.where(visible & ~k_good[None, :], float("nan"), ds)
        dq = dot_add(narrow(ds, k.dtype, PRECISION), k, dq, PRECISION)
    return dq


@triton.jit
def _flash_attn_bwd_queries_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, bias_ptr, slopes_ptr, rng_ptr, dq_ptr,
    cu_q_ptr, cu_k_ptr, tiles_ptr,
    q_strides, k_strides, v_strides, do_strides, lse_strides, bias_strides, slope_strides,
    dq_strides,
    count, heads, group, num_rows, num_keys, num_tiles, window, scales, gradient_scale, keep_from,
    keep_factor,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, TOP_LEFT: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
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
    delta = tl.load(delta_ptr + row_values + rows, mask=rows < num_rows, other=0.0)
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

    dq = tl.zeros((M, BLOCK_D), tl.float32)
    last = tl.minimum(first + M, num_rows) - 1
    lo, full_lo, full_hi, hi = key_range(first, last, offset, num_keys, window, N, LEFT, RIGHT)
    if BIAS != NO_BIAS:
        full_lo = lo
        full_hi = lo
    if LEFT:
        dq = _walk_keys(
            dq, q, do, base, delta, k_ptrs, v_ptrs, k_step, v_step, lo, tl.minimum(full_lo, hi),
            rows, diagonal, num_rows, num_keys, window, scales, bias_row, bias_strides[3], slope,
            rng_ptr, lane, keep_from, keep_factor, dims, value_dims, True, D, E, M, N, LEFT, RIGHT,
            BIAS, SOFTCAP, ALIBI, DROPOUT, PRECISION,
        )  # fmt: skip
    if BIAS == NO_BIAS:
        dq = _walk_keys(
            dq, q, do, base, delta, k_ptrs, v_ptrs, k_step, v_step, full_lo, full_hi,
            rows, diagonal, num_rows, num_keys, window, scales, bias_row, bias_strides[3], slope,
            rng_ptr, lane, keep_from, keep_factor, dims, value_dims, False, D, E, M, N, LEFT,
            RIGHT, BIAS, SOFTCAP, ALIBI, DROPOUT, PRECISION,
        )  # fmt: skip
    dq = _walk_keys(
        dq, q, do, base, delta, k_ptrs, v_ptrs, k_step, v_step, full_hi, hi,
        rows, diagonal, num_rows, num_keys, window, scales, bias_row, bias_strides[3], slope,
        rng_ptr, lane, keep_from, keep_factor, dims, value_dims, True, D, E, M, N, LEFT, RIGHT,
        BIAS, SOFTCAP, ALIBI, DROPOUT, PRECISION,
    )  # fmt: skip

    dq *= gradient_scale
    dq_ptrs = tile_pointers(dq_ptr, dq_strides, b, row_base + first, head, own_rows, dims)
    stored = (rows < num_rows)[:, None] & (dims < D)[None, :]
    tl.store(dq_ptrs, narrow(dq, dq_ptr.dtype.element_ty, PRECISION), mask=stored)


def query_gradients_launch(
    problem: Problem, dout: Tensor, lse: Tensor, delta: Tensor, dq: Tensor
) -> Launch:
    """How ``dq`` (as q, contiguous) is filled."""
    wish = config.query_gradient_tile(
        problem.width, problem.q.element_size(), problem.is_plain, problem.chip
    )
    tile = config.shrink(wish, problem.rows, problem.keys)
    num_tiles, tiles = triton.cdiv(problem.rows, tile.rows), None
    if problem.sequences is not None:
        sequences = problem.sequences
        tiles = sequences.tiles(sequences.cu_seqlens_q, problem.rows, tile.rows)
        num_tiles = tiles.shape[1]
    args = {
        **problem.args(),
        "do_ptr": dout,
        "lse_ptr": lse,
        "delta_ptr": delta,
        "dq_ptr": dq,
        "tiles_ptr": tiles,
        "do_strides": strides(dout),
        "lse_strides": row_value_strides(lse),
        "dq_strides": strides(dq),
        "num_tiles": num_tiles,
        "gradient_scale": problem.options.softmax_scale,
        "keep_factor": problem.keep_factor(),
    }
    constants = {**problem.constants(), "M": tile.rows, "N": tile.keys}
    programs = num_tiles * problem.heads * problem.batch if dq.numel() else 0
    return Launch(_flash_attn_bwd_queries_kernel, programs, args, constants, tile)
