"""Rows gathered from all ranks while they are multiplied, in one persistent kernel.

    y = concatenation over ranks of x_r @ weight.T + bias

At turn t a rank pushes its rows to its t-th successor (a few rows at a time, each with a flag), one
turn ahead of the products of the rows that its t-th predecessor pushed (``tile_order``). So remote
stores fly while products are computed, and what is multiplied first is what the rank has itself.

A program waits only for pushes, and pushes of a turn come before the products of that turn in every
program: with as many programs as are resident, nobody waits for what cannot run.

A slot holds ``[W, window, K]``. The flag of piece i of source r is number ``r * (rows - 1) + i``
behind the greeting.

Letters: W = ranks, K = in features, N = out features of this rank.
"""

# ruff: noqa: ANN001, ANN202, PLR0913
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from mcp_kernels.triton.flash_attn_scores import dot_add, narrow
from mcp_kernels.triton.symmetric_flags import (
    DEAD,
    epoch_of,
    finish,
    flag_row,
    publish,
    publish_to,
    wait_all,
    wait_pieces,
    words_of,
)
from mcp_kernels.triton.tile_order import grouped, local_at, peer_at, source_at


@triton.jit
def _rows_of(rank, cut):
    """Rows of a rank inside the window; ``cut``: (all rows, part, window start, window)."""
    size, part, start, window = cut
    return tl.maximum(tl.minimum(tl.minimum(size - rank * part, part) - start, window), 0)


@triton.jit
def _slot(buffers, rank, slot_at, TYPE: tl.constexpr):
    return (tl.load(buffers + rank) + slot_at).to(tl.pointer_type(TYPE), bitcast=True)


@triton.jit
def _copy_rows(
    to, to_stride, source, row_stride, column_stride, first, rows, K, PUSH: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Copy PUSH rows from ``first`` on, as far as there are ``rows``."""
    row = first + tl.arange(0, PUSH)
    column = tl.arange(0, BLOCK_C)
    wide = row.to(tl.int64)[:, None]
    for start in range(0, K, BLOCK_C):
        at = (start + column)[None, :]
        inside = (row < rows)[:, None] & (at < K)
        value = tl.load(source + wide * row_stride + at.to(tl.int64) * column_stride, mask=inside)
        tl.store(to + wide * to_stride + at, value, mask=inside)


@triton.jit
def _product(
    x, weight, bias, rows_left, n, N, K, weight_strides,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``[BLOCK_M, BLOCK_N]`` float32 of contiguous rows at ``x``."""
    row, col, k = tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    has_row, has_col = row < rows_left, col < N
    x_at = x + row.to(tl.int64)[:, None] * K + k[None, :]
    w_at = weight + col.to(tl.int64)[None, :] * weight_strides[0]
    w_at += k.to(tl.int64)[:, None] * weight_strides[1]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        has_k = start + k < K
        a = tl.load(x_at, mask=has_row[:, None] & has_k[None, :], other=0.0)
        b = tl.load(w_at, mask=has_k[:, None] & has_col[None, :], other=0.0)
        acc = dot_add(a, b, acc, PRECISION)
        x_at += BLOCK_K
        w_at += BLOCK_K * weight_strides[1]
    if HAS_BIAS:
        acc += tl.load(bias + col, mask=has_col, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _push(
    x, buffers, rank, to, slot_at, epoch, alive, flags, program, num_programs, strides, cut, K,
    TYPE: tl.constexpr, PUSH: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """This program's share of the rank's rows into the slot of rank ``to``, with their flags."""
    rows, window = _rows_of(rank, cut), cut[3]
    target = _slot(buffers, to, slot_at, TYPE) + (tl.zeros((), tl.int64) + rank * window) * K
    for piece in range(program, tl.cdiv(rows, PUSH), num_programs):
        _copy_rows(target, K, x, strides[0], strides[1], piece * PUSH, rows, K, PUSH, BLOCK_C)
        if alive != 0:
            publish_to(buffers, to, flags + piece, epoch)


@triton.jit
def _all_gather_matmul_kernel(
    x,
    weight,
    bias,
    y,
    gathered,
    buffers,
    error,
    rank,
    N,
    K,
    strides,
    y_stride,
    cut,
    num_m,
    num_n,
    group,
    num_rows,
    slots_at,
    slot_bytes,
    first_program,
    num_programs,
    HAS_BIAS: tl.constexpr,
    HAS_GATHERED: tl.constexpr,
    PRECISION: tl.constexpr,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    TIMEOUT_NS: tl.constexpr,
    PUSH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    TYPE: tl.constexpr = y.dtype.element_ty
    PIECES: tl.constexpr = BLOCK_M // PUSH
    program = tl.program_id(0) + first_program
    own = words_of(buffers, rank)
    epoch = epoch_of(own)
    alive = (tl.load(own + DEAD) == 0).to(tl.int32)
    slot_at = slots_at + (epoch % 2) * slot_bytes
    mine = _slot(buffers, rank, slot_at, TYPE)
    part, start, window = cut[1], cut[2], cut[3]
    greeting = flag_row(epoch, 0, num_rows, WORLD)
    pushed = flag_row(epoch, 1, num_rows, WORLD)
    if (program == 0) & (alive != 0):
        publish(buffers, greeting + rank, epoch, WORLD, LANES)

    for turn in range(WORLD + 1):
        if turn < WORLD:
            to = peer_at(rank, turn + WORLD - 1, WORLD)  # itself first
            _push(
                x, buffers, rank, to, slot_at, epoch, alive, pushed + rank * (num_rows - 1),
                program, num_programs, strides, cut, K, TYPE, PUSH, BLOCK_C,
            )  # fmt: skip
        source = source_at(rank, turn - 1, WORLD)
        rows = _rows_of(source, cut)
        if turn > 0:
            for step in range(tl.cdiv(num_m * num_n, num_programs)):
                local = local_at(step, program, num_programs)
                m, n = grouped(local, num_m, num_n, group)
                left = rows - m * BLOCK_M
                if (local < num_m * num_n) & (left > 0):
                    if alive != 0:
                        alive = wait_pieces(
                            own, error, pushed + source * (num_rows - 1), m * PIECES,
                            tl.cdiv(rows, PUSH), source, epoch, PIECES, TIMEOUT_NS,
                        )  # fmt: skip
                    held = mine + (source * window + m * BLOCK_M).to(tl.int64) * K
                    row = source * part + start + m * BLOCK_M
                    acc = _product(
                        held, weight, bias, left, n, N, K, (strides[2], strides[3]),
                        HAS_BIAS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
                    )  # fmt: skip
                    acc = tl.where(alive != 0, acc, float("nan"))
                    at_row, col = tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N)
                    at = y + (row + at_row).to(tl.int64)[:, None] * y_stride + col[None, :]
                    inside = (at_row < left)[:, None] & (col < N)[None, :]
                    tl.store(at, narrow(acc, TYPE, PRECISION), mask=inside)
                    if HAS_GATHERED and n == 0:
                        kept = gathered + row.to(tl.int64) * K
                        for piece in range(PIECES):
                            _copy_rows(kept, K, held, K, 1, piece * PUSH, left, K, PUSH, BLOCK_C)

    if (program == 0) & (alive != 0):
        wait_all(own, error, greeting, epoch, WORLD, LANES, TIMEOUT_NS)
    finish(own, epoch, num_programs)
