"""The dbias kernel of attention: one tile of the bias a program.

    dbias = sum of dS over every dimension that the bias was broadcast in

A program walks over all that its tile was broadcast to, in one order; nothing of the size of the
scores is held, and the bits are the same every time. Scores are recomputed: two products more.

Letters: see ``flash_attn_scores.py``.
"""

# ruff: noqa: ANN001, ANN202, PLR0913
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
    dot,
    dropout_keep,
    finish_scores,
    load_base,
    load_tile,
    narrow,
    probabilities,
    score_gradients,
    tile_pointers,
)
from mcp_kernels.triton.launch import Launch


@triton.jit
def _flash_attn_bwd_bias_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, bias_ptr, slopes_ptr, rng_ptr, dbias_ptr,
    q_strides, k_strides, v_strides, do_strides, lse_strides, bias_strides, slope_strides,
    dbias_strides, own, walked,
    group, num_rows, num_keys, window, scales, keep_from, keep_factor,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, TOP_LEFT: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr, ONE_ROW: tl.constexpr, ONE_KEY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``own`` and ``walked`` count (batch entries, heads, row tiles, key tiles).

    ``own`` are the tiles of the bias, one a program; ``walked`` is what each was broadcast to.
    """
    pid = tl.program_id(0)
    own_key = pid % own[3]
    own_row = pid // own[3] % own[2]
    own_head = pid // (own[3] * own[2]) % own[1]
    own_b = pid // (own[3] * own[2] * own[1])
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_E)
    offset = 0 if TOP_LEFT else num_keys - num_rows
    total = tl.zeros((M, N), tl.float32)
    for at in range(walked[0] * walked[1] * walked[2] * walked[3]):
        key_tile = own_key + at % walked[3]
        row_tile = own_row + at // walked[3] % walked[2]
        head = own_head + at // (walked[3] * walked[2]) % walked[1]
        b = own_b + at // (walked[3] * walked[2] * walked[1])
        rows = row_tile * M + tl.arange(0, M)
        keys = key_tile * N + tl.arange(0, N)
        q = load_tile(
            tile_pointers(q_ptr, q_strides, b, tl.full((), 0, tl.int64), head, rows, dims),
            rows, num_rows, dims, D, True,
        )  # fmt: skip
        do = load_tile(
            tile_pointers(do_ptr, do_strides, b, tl.full((), 0, tl.int64), head, rows, value_dims),
            rows, num_rows, value_dims, E, True,
        )  # fmt: skip
        kv_head = head // group
        k = load_tile(
            tile_pointers(k_ptr, k_strides, b, tl.full((), 0, tl.int64), kv_head, keys, dims),
            keys, num_keys, dims, D, True,
        )  # fmt: skip
        v = load_tile(
            tile_pointers(v_ptr, v_strides, b, tl.full((), 0, tl.int64), kv_head, keys, value_dims),
            keys, num_keys, value_dims, E, True,
        )  # fmt: skip
        bias_ptrs = bias_ptr + b.to(tl.int64) * bias_strides[0]
        bias_ptrs += head.to(tl.int64) * bias_strides[1]
        bias_ptrs += rows.to(tl.int64)[:, None] * bias_strides[2]
        bias_ptrs += keys.to(tl.int64)[None, :] * bias_strides[3]
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes_ptr + b * slope_strides[0] + head * slope_strides[1])
            slope = slope.to(tl.float32) * (1.0 if BIAS == FLOAT_BIAS else LOG2E)
        inside = (rows < num_rows)[:, None] & (keys < num_keys)[None, :]
        s = dot(q, tl.trans(k), PRECISION)
        s, _squashed, visible = finish_scores(
            s, (rows + offset)[:, None], keys[None, :], inside, window, scales, bias_ptrs, slope,
            True, LEFT, RIGHT, BIAS, SOFTCAP, ALIBI,
        )  # fmt: skip
        row_values = b.to(tl.int64) * lse_strides[0] + head.to(tl.int64) * lse_strides[1]
        base = load_base(lse_ptr + row_values, rows, num_rows, BIAS)
        delta = tl.load(delta_ptr + row_values + rows, mask=rows < num_rows, other=0.0)
        p = probabilities(s, base[:, None], visible, True, BIAS)
        dp = dot(do, tl.trans(v), PRECISION)
        if DROPOUT:
            lane = b * 65536 + head
            keep = dropout_keep(rng_ptr, lane, rows[:, None], key_tile * N, keep_from, M, N)
            dp = tl.where(keep, dp * keep_factor, 0.0)
        total += score_gradients(p, dp, delta[:, None], visible, True)

    rows = own_row * M + tl.arange(0, M)
    keys = own_key * N + tl.arange(0, N)
    if ONE_ROW:
        total = tl.sum(total, 0, keep_dims=True)
        rows = tl.zeros((1,), tl.int32)
        num_rows = 1
    if ONE_KEY:
        total = tl.sum(total, 1, keep_dims=True)
        keys = tl.zeros((1,), tl.int32)
        num_keys = 1
    to = dbias_ptr + own_b.to(tl.int64) * dbias_strides[0]
    to += own_head.to(tl.int64) * dbias_strides[1]
    to += rows.to(tl.int64)[:, None] * dbias_strides[2] + keys[None, :]
    stored = (rows < num_rows)[:, None] & (keys < num_keys)[None, :]
    tl.store(to, narrow(total, dbias_ptr.dtype.element_ty, PRECISION), mask=stored)


def bias_gradient_launch(
    problem: Problem, dout: Tensor, lse: Tensor, delta: Tensor, dbias: Tensor
) -> Launch:
    """How ``dbias`` (of the bias's own shape, contiguous) is filled."""
    wish = config.bias_gradient_tile(problem.width, problem.q.element_size(), problem.chip)
    tile = config.shrink(wish, problem.rows, problem.keys)
    full = (
        *(problem.batch, problem.heads),
        *(triton.cdiv(problem.rows, tile.rows), triton.cdiv(problem.keys, tile.keys)),
    )
    whole = (problem.batch, problem.heads, problem.rows, problem.keys)
    is_own = [have == want for have, want in zip(dbias.shape, whole, strict=True)]
    own = tuple(n if mine else 1 for n, mine in zip(full, is_own, strict=True))
    walked = tuple(1 if mine else n for n, mine in zip(full, is_own, strict=True))
    args = {
        **problem.args(),
        "do_ptr": dout,
        "lse_ptr": lse,
        "delta_ptr": delta,
        "dbias_ptr": dbias,
        "do_strides": strides(dout),
        "lse_strides": row_value_strides(lse),
        "dbias_strides": dbias.stride(),
        "own": own,
        "walked": walked,
        "keep_factor": problem.keep_factor(),
    }
    constants = {
        **problem.constants(),
        "M": tile.rows,
        "N": tile.keys,
        "ONE_ROW": not is_own[2],
        "ONE_KEY": not is_own[3],
    }
    taken = set(_flash_attn_bwd_bias_kernel.arg_names)
    return Launch(
        _flash_attn_bwd_bias_kernel,
        own[0] * own[1] * own[2] * own[3] if dbias.numel() else 0,
        {name: value for name, value in args.items() if name in taken},
        {name: value for name, value in constants.items() if name in taken},
        tile,
    )
