"""The dK, dV kernel of attention: one tile of keys a program, all query heads of its group.

    P   = exp(S - lse)               dV = sum_rows (P keep / (1 - p))^T dO
    dP  = (dO v^T) keep / (1 - p)    dS = P (dP - delta)
    dK  = scale sum_rows (dS (1 - tanh^2))^T q

Tiles are held as ``[keys, rows]``, so that both sums are products as they stand. The sum over rows
and heads is taken by one program in one order: no atomics, the same bits every time.

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
    load_base,
    load_rows,
    load_tile,
    narrow,
    probabilities,
    row_range,
    score_gradients,
    sequence,
    tile_of,
    tile_pointers,
)
from mcp_kernels.triton.launch import Launch


@triton.jit
def _walk_rows(
    dk, dv, k, v, q_ptrs, do_ptrs, q_step, do_step, lse_row, delta_row, lo, hi, keys, offset,
    num_rows, num_keys, window, scales, bias_head, bias_strides, slope, rng_ptr, lane, first_key,
    keep_from, keep_factor, dims, value_dims,
    MASKED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WANT_DK: tl.constexpr,
    WANT_DV: tl.constexpr,
):  # fmt: skip
    """Add what the rows lo..hi of one head give to dk and dv."""
    for start in range(lo, hi, M):
        rows = start + tl.arange(0, M)
        step = tl.cast(start, tl.int64)
        base = load_base(lse_row, rows, num_rows, BIAS)
        delta = tl.load(delta_row + rows, mask=rows < num_rows, other=0.0)
        if MASKED:
            # A hidden pair has probability 0, and 0 * NaN is NaN. A row with NaN or infinity in q
            # or dO has it in lse or delta, too: it is left out, and is NaN to the keys it sees.
            is_good = (tl.abs(base) < float("inf")) & (tl.abs(delta) < float("inf"))
            base = tl.where(tl.abs(delta) < float("inf"), base, float("nan"))
            q = load_rows(q_ptrs + step * q_step, is_good, dims, D)
        else:
            q = load_tile(q_ptrs + step * q_step, rows, num_rows, dims, D, True)
        s = dot(k, tl.trans(q), PRECISION)  # [N, M]
        inside = (keys < num_keys)[:, None] & (rows < num_rows)[None, :]
        bias_ptrs = bias_head
        if BIAS != NO_BIAS:
            bias_ptrs = bias_head + rows.to(tl.int64)[None, :] * bias_strides[2]
            bias_ptrs += keys.to(tl.int64)[:, None] * bias_strides[3]
        s, squashed, visible = finish_scores(
            s, (rows + offset)[None, :], keys[:, None], inside, window, scales, bias_ptrs, slope,
            MASKED, LEFT, RIGHT, BIAS, SOFTCAP, ALIBI,
        )  # fmt: skip
        p = probabilities(s, base[None, :], visible, MASKED, BIAS)
        if MASKED:
            do = load_rows(do_ptrs + step * do_step, is_good, value_dims, E)
        else:
            do = load_tile(do_ptrs + step * do_step, rows, num_rows, value_dims, E, True)
        if DROPOUT:
            keep = tl.trans(dropout_keep(rng_ptr, lane, rows[:, None], first_key, keep_from, M, N))
        if WANT_DV:
            dropped = p
            if DROPOUT:
                dropped = tl.where(keep, p * keep_factor, 0.0)
            dv = dot_add(narrow(dropped, do.dtype, PRECISION), do, dv, PRECISION)
        if WANT_DK:
            dp = dot(v, tl.trans(do), PRECISION)
            if DROPOUT:
                dp = tl.where(keep, dp * keep_factor, 0.0)
            ds = score_gradients(p, dp, delta[None, :], visible, MASKED)
            if SOFTCAP:
                ds *= 1.0 - squashed * squashed
            dk = dot_add(narrow(ds, q.dtype, PRECISION), q, dk, PRECISION)
    return dk, dv


@triton.jit
def _flash_attn_bwd_keys_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, bias_ptr, slopes_ptr, rng_ptr, dk_ptr, dv_ptr,
    cu_q_ptr, cu_k_ptr, tiles_ptr,
    q_strides, k_strides, v_strides, do_strides, lse_strides, bias_strides, slope_strides,
    dk_strides, dv_strides,
    count, heads, group, num_rows, num_keys, num_tiles, window, scales, gradient_scale, keep_from,
    keep_factor,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, TOP_LEFT: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
    ALL_MASKED: tl.constexpr, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr,
):  # fmt: skip
    # Under a causal mask the first keys are seen by the most rows: their tiles go first as it is.
    b, kv_head, tile = tile_of(
        tl.program_id(0), tiles_ptr, num_tiles, heads // group, False, VARLEN
    )
    if b < 0:
        return
    row_base, key_base, num_rows, num_keys = sequence(
        b, cu_q_ptr, cu_k_ptr, num_rows, num_keys, VARLEN
    )
    first = tile * N
    size = tl.arange(0, N)
    keys = first + size
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_E)
    offset = 0 if TOP_LEFT else num_keys - num_rows
    unit = 1.0 if BIAS == FLOAT_BIAS else LOG2E

    k_ptrs = tile_pointers(k_ptr, k_strides, b, key_base + first, kv_head, size, dims)
    k = load_tile(k_ptrs, keys, num_keys, dims, D, True)
    v_ptrs = tile_pointers(v_ptr, v_strides, b, key_base + first, kv_head, size, value_dims)
    v = load_tile(v_ptrs, keys, num_keys, value_dims, E, True)
    dk = tl.zeros((N, BLOCK_D), tl.float32)
    dv = tl.zeros((N, BLOCK_E), tl.float32)
    q_step = tl.cast(q_strides[1], tl.int64)
    do_step = tl.cast(do_strides[1], tl.int64)

    last = tl.minimum(first + N, num_keys) - 1
    lo, full_lo, full_hi, hi = row_range(first, last, offset, num_rows, window, M, LEFT, RIGHT)
    # Keys past the end need no mask: what they get is in rows of dK and dV that are not stored.
    for member in range(group):
        head = kv_head * group + member
        lane = b * 65536 + head
        rows = tl.arange(0, M)
        q_ptrs = tile_pointers(q_ptr, q_strides, b, row_base, head, rows, dims)
        do_ptrs = tile_pointers(do_ptr, do_strides, b, row_base, head, rows, value_dims)
        row_values = b.to(tl.int64) * lse_strides[0] + head.to(tl.int64) * lse_strides[1] + row_base
        bias_head = bias_ptr
        if BIAS != NO_BIAS:
            bias_head = bias_ptr + b.to(tl.int64) * bias_strides[0]
            bias_head += head.to(tl.int64) * bias_strides[1]
        slope = 0.0
        if ALIBI:
            own = tl.minimum(b, count - 1)
            slope = tl.load(slopes_ptr + own * slope_strides[0] + head * slope_strides[1])
            slope = slope.to(tl.float32) * unit
        if not ALL_MASKED:
            if RIGHT:
                dk, dv = _walk_rows(
                    dk, dv, k, v, q_ptrs, do_ptrs, q_step, do_step, lse_ptr + row_values,
                    delta_ptr + row_values, lo, tl.minimum(full_lo, hi), keys, offset, num_rows,
                    num_keys, window, scales, bias_head, bias_strides, slope, rng_ptr, lane, first,
                    keep_from, keep_factor, dims, value_dims, True, D, E, M, N, LEFT, RIGHT, BIAS,
                    SOFTCAP, ALIBI, DROPOUT, PRECISION, WANT_DK, WANT_DV,
                )  # fmt: skip
            dk, dv = _walk_rows(
                dk, dv, k, v, q_ptrs, do_ptrs, q_step, do_step, lse_ptr + row_values,
                delta_ptr + row_values, full_lo, full_hi, keys, offset, num_rows, num_keys, window,
                scales, bias_head, bias_strides, slope, rng_ptr, lane, first, keep_from,
                keep_factor, dims, value_dims, False, D, E, M, N, LEFT, RIGHT, BIAS, SOFTCAP,
                ALIBI, DROPOUT, PRECISION, WANT_DK, WANT_DV,
            )  # fmt: skip
        else:
            dk, dv = _walk_rows(
                dk, dv, k, v, q_ptrs, do_ptrs, q_step, do_step, lse_ptr + row_values,
                delta_ptr + row_values, lo, hi, keys, offset, num_rows, num_keys, window,
                scales, bias_head, bias_strides, slope, rng_ptr, lane, first, keep_from,
                keep_factor, dims, value_dims, True, D, E, M, N, LEFT, RIGHT, BIAS, SOFTCAP, ALIBI,
                DROPOUT, PRECISION, WANT_DK, WANT_DV,
            )  # fmt: skip

    dk *= gradient_scale
    dk_ptrs = tile_pointers(dk_ptr, dk_strides, b, key_base + first, kv_head, size, dims)
    dv_ptrs = tile_pointers(dv_ptr, dv_strides, b, key_base + first, kv_head, size, value_dims)
    stored = (keys < num_keys)[:, None]
    dk = narrow(dk, dk_ptr.dtype.element_ty, PRECISION)
    dv = narrow(dv, dv_ptr.dtype.element_ty, PRECISION)
    if WANT_DK:
        tl.store(dk_ptrs, dk, mask=stored & (dims < D)[None, :])
    if WANT_DV:
        tl.store(dv_ptrs, dv, mask=stored & (value_dims < E)[None, :])


# 16-bit types at this width hold k and v as operands in registers, 64 a thread, beside 128 of dK
# and dV: more than there are. Each of the two on its own fits, for one product more.
_WIDTH_OF_TWO_PASSES = 128
# Above it dK or dV and its operands leave no registers for a loop of masked tiles and one of full.
_WIDTH_OF_TWO_LOOPS = 128


def key_gradients_launches(
    problem: Problem, dout: Tensor, lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor
) -> list[Launch]:
    """How ``dk`` and ``dv`` (as k and v, contiguous) are filled: in one pass, or one for each."""
    wish = config.key_gradient_tile(
        problem.width,
        problem.q.element_size(),
        problem.is_plain,
        problem.rng is not None,
        problem.chip,
    )
    tile = config.shrink(wish, problem.rows, problem.keys)
    num_tiles, tiles = triton.cdiv(problem.keys, tile.keys), None
    if problem.sequences is not None:
        sequences = problem.sequences
        tiles = sequences.tiles(sequences.cu_seqlens_k, problem.keys, tile.keys)
        num_tiles = tiles.shape[1]
    args = {
        **problem.args(),
        "do_ptr": dout,
        "lse_ptr": lse,
        "delta_ptr": delta,
        "dk_ptr": dk,
        "dv_ptr": dv,
        "tiles_ptr": tiles,
        "do_strides": strides(dout),
        "lse_strides": row_value_strides(lse),
        "dk_strides": strides(dk),
        "dv_strides": strides(dv),
        "num_tiles": num_tiles,
        "gradient_scale": problem.options.softmax_scale,
        "keep_factor": problem.keep_factor(),
    }
    # A bias hides anything. A window that ends to the left would make a third loop beside those
    # for the diagonal and for what all see, and its code takes registers from both; so does a
    # second loop that draws a dropout mask, or any at a width of 256.
    is_all_masked = (
        not problem.is_plain
        or problem.options.window_left >= 0
        or problem.width > _WIDTH_OF_TWO_LOOPS
    )
    constants = {
        **problem.constants(),
        "M": tile.rows,
        "N": tile.keys,
        "ALL_MASKED": is_all_masked,
    }
    programs = num_tiles * problem.kv_heads * problem.batch if dk.numel() + dv.numel() else 0
    has_two = problem.width >= _WIDTH_OF_TWO_PASSES and problem.q.element_size() == 2
    passes = [(False, True), (True, False)] if has_two else [(True, True)]
    return [
        Launch(
            _flash_attn_bwd_keys_kernel,
            programs,
            args,
            {**constants, "WANT_DK": wants_dk, "WANT_DV": wants_dv},
            tile,
        )
        for wants_dk, wants_dv in passes
    ]
