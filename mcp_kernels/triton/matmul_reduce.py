"""A matmul whose product is summed over the ranks, in one persistent kernel.

    y = sum over ranks of x_r @ weight_r.T, plus bias once

Three forms of one schedule (``tile_order``). A step of program c on every rank:

    compute   the products of tile ``local_at(step, c)`` of every owner, each into the own slot,
              each followed by a flag for who needs it
    reduce    the own tile of the step before, when all ranks' flags are up: sum in rank order
    gather    (two-shot) the other owners' tiles of the step before that, when theirs are up

ONE_SHOT   every rank reduces every tile: least latency, W times the reading
TWO_SHOT   a tile's owner reduces it, the others copy the sum
SCATTER    the owner of a row reduces it; nothing is gathered

Program c waits only for program c of other ranks and for steps before its own, so with as many
programs as are resident nobody waits for what cannot run. While a step's flags travel the next
step's products are computed.

A product is rounded to x's type, as a rank of the reference does; sums are float32, in rank order,
rounded once: all ranks hold the same bits. In a slot a tile lies contiguous, BLOCK_M x BLOCK_N.

After a wait that failed nothing more is published, and every result is NaN.

Letters: W = ranks, G = programs, Q = tiles of an owner, M, N, K of the local matmul.
"""

# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, C901
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from mcp_kernels.triton.flash_attn_scores import dot_add, narrow
from mcp_kernels.triton.multicast import multicast_sum_tile
from mcp_kernels.triton.symmetric_flags import (
    DEAD,
    epoch_of,
    finish,
    flag_row,
    publish,
    publish_to,
    wait_all,
    wait_one,
    words_of,
)
from mcp_kernels.triton.tile_order import grouped, local_at, peer_at, tile_of

ONE_SHOT = tl.constexpr(0)
TWO_SHOT = tl.constexpr(1)
SCATTER = tl.constexpr(2)


@triton.jit
def _tile_rows(owner, local, tile, parts, FORM: tl.constexpr, BLOCK_M: tl.constexpr):
    """(tile column, first row of x, rows left) of an owner's tile.

    ``parts``: (rows, part size, window start, window rows, tiles down, tiles across, group).
    """
    rows, part_rows, window, window_rows, num_m, num_n, group = parts
    if FORM == SCATTER:
        m, n = grouped(local, num_m, num_n, group)
        first = owner * part_rows + window + m * BLOCK_M
        part_end = tl.minimum((owner + 1) * part_rows, rows)
        end = tl.minimum(owner * part_rows + window + window_rows, part_end)
    else:
        m, n = grouped(tile, num_m, num_n, group)
        first = m * BLOCK_M
        end = rows
    return n, first, tl.maximum(end - first, 0)


@triton.jit
def _product(
    x,
    weight,
    bias,
    first_row,
    rows_left,
    n,
    N,
    K,
    strides,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``[BLOCK_M, BLOCK_N]`` float32 of one tile; rows and columns outside are zero."""
    row, col, k = tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    has_row, has_col = row < rows_left, col < N
    at_row = (first_row + row).to(tl.int64)
    x_at = x + at_row[:, None] * strides[0] + k.to(tl.int64)[None, :] * strides[1]
    w_at = weight + col.to(tl.int64)[None, :] * strides[2] + k.to(tl.int64)[:, None] * strides[3]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        has_k = start + k < K
        a = tl.load(x_at, mask=has_row[:, None] & has_k[None, :], other=0.0)
        b = tl.load(w_at, mask=has_k[:, None] & has_col[None, :], other=0.0)
        acc = dot_add(a, b, acc, PRECISION)
        x_at += BLOCK_K * strides[1]
        w_at += BLOCK_K * strides[3]
    if HAS_BIAS:
        acc += tl.load(bias + col, mask=has_col, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _inside(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """``[BLOCK_M, BLOCK_N]`` places of a tile in a slot."""
    row, col = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    return tile.to(tl.int64) * (BLOCK_M * BLOCK_N) + row[:, None] * BLOCK_N + col[None, :]


@triton.jit
def put_tile(
    slot, tile, value, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Round a float32 tile into a slot."""
    tl.store(
        slot + _inside(tile, BLOCK_M, BLOCK_N), narrow(value, slot.dtype.element_ty, PRECISION)
    )


@triton.jit
def get_tile(slot, tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile of a slot, as float32."""
    return tl.load(slot + _inside(tile, BLOCK_M, BLOCK_N)).to(tl.float32)


@triton.jit
def _slot(buffers, rank, slot_at, TYPE: tl.constexpr):
    """The slot of the running call in a rank's buffer."""
    return (tl.load(buffers + rank) + slot_at).to(tl.pointer_type(TYPE), bitcast=True)


@triton.jit
def _store(
    y, value, first_row, rows_left, n, N, y_stride, alive, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, col = tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N)
    at = y + (first_row + row).to(tl.int64)[:, None] * y_stride + col[None, :]
    value = tl.where(alive != 0, value.to(tl.float32), float("nan"))
    tl.store(
        at,
        narrow(value, y.dtype.element_ty, PRECISION),
        mask=(row < rows_left)[:, None] & (col < N)[None, :],
    )


@triton.jit
def _matmul_reduce_kernel(
    x,
    weight,
    bias,
    y,
    buffers,
    error,
    multicast,
    rank,
    N,
    K,
    strides,
    y_stride,
    parts,
    tiles,
    per_owner,
    num_rows,
    slots_at,
    slot_bytes,
    first_program,
    num_programs,
    FORM: tl.constexpr,
    MULTICAST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    TIMEOUT_NS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    TYPE: tl.constexpr = y.dtype.element_ty
    OWNERS: tl.constexpr = 1 if FORM == ONE_SHOT else WORLD
    LAG: tl.constexpr = 2 if FORM == TWO_SHOT else 1
    program = tl.program_id(0) + first_program
    own = words_of(buffers, rank)
    epoch = epoch_of(own)
    alive = (tl.load(own + DEAD) == 0).to(tl.int32)
    slot_at = slots_at + (epoch % 2) * slot_bytes
    mine = _slot(buffers, rank, slot_at, TYPE)
    reduced_row = 1 + per_owner  # rows of flags: the greeting, products, sums
    if (program == 0) & (alive != 0):
        publish(buffers, flag_row(epoch, 0, num_rows, WORLD) + rank, epoch, WORLD, LANES)

    steps = tl.cdiv(per_owner, num_programs)
    for step in range(steps + LAG):
        local = local_at(step, program, num_programs)
        for turn in range(OWNERS):
            owner = 0 if FORM == ONE_SHOT else peer_at(rank, turn, WORLD)
            tile = tile_of(owner, local, per_owner)
            if (local < per_owner) & (tile < tiles):
                n, first, left = _tile_rows(owner, local, tile, parts, FORM, BLOCK_M)
                acc = _product(
                    x, weight, bias, first, left, n, N, K, strides,
                    HAS_BIAS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
                )  # fmt: skip
                put_tile(mine, tile, acc, PRECISION, BLOCK_M, BLOCK_N)
                at = flag_row(epoch, 1 + local, num_rows, WORLD) + rank
                if alive != 0:
                    if FORM == ONE_SHOT:
                        publish(buffers, at, epoch, WORLD, LANES)
                    else:
                        publish_to(buffers, owner, at, epoch)

        local = local_at(step - 1, program, num_programs)
        owner = 0 if FORM == ONE_SHOT else rank
        tile = tile_of(owner, local, per_owner)
        if (step >= 1) & (local < per_owner) & (tile < tiles):
            if alive != 0:
                at = flag_row(epoch, 1 + local, num_rows, WORLD)
                alive = wait_all(own, error, at, epoch, WORLD, LANES, TIMEOUT_NS)
            n, first, left = _tile_rows(owner, local, tile, parts, FORM, BLOCK_M)
            if MULTICAST:
                tile_bytes: tl.constexpr = BLOCK_M * BLOCK_N * TYPE.primitive_bitwidth // 8
                at = multicast + slot_at + tile.to(tl.int64) * tile_bytes
                multicast_sum_tile(at, TYPE, BLOCK_M * BLOCK_N)
            else:
                total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                for peer in range(WORLD):
                    part = _slot(buffers, peer, slot_at, TYPE)
                    total += get_tile(part, tile, BLOCK_M, BLOCK_N)
                if FORM == TWO_SHOT:
                    # Only the owner reads its own slot's copy of the tile before the next flag.
                    put_tile(mine, tile, total, PRECISION, BLOCK_M, BLOCK_N)
                y_first = first - rank * parts[1] if FORM == SCATTER else first
                _store(y, total, y_first, left, n, N, y_stride, alive, PRECISION, BLOCK_M, BLOCK_N)
            if FORM == TWO_SHOT and alive != 0:
                at = flag_row(epoch, reduced_row + local, num_rows, WORLD) + rank
                publish(buffers, at, epoch, WORLD, LANES)

        if FORM == TWO_SHOT:
            local = local_at(step - 2, program, num_programs)
            for turn in range(WORLD if MULTICAST else WORLD - 1):
                owner = peer_at(rank, turn, WORLD)
                tile = tile_of(owner, local, per_owner)
                if (step >= 2) & (local < per_owner) & (tile < tiles):
                    if alive != 0:
                        at = flag_row(epoch, reduced_row + local, num_rows, WORLD)
                        alive = wait_one(own, error, at, owner, epoch, TIMEOUT_NS)
                    n, first, left = _tile_rows(owner, local, tile, parts, FORM, BLOCK_M)
                    # The switch has put the sum into every slot.
                    held = _slot(buffers, rank if MULTICAST else owner, slot_at, TYPE)
                    total = get_tile(held, tile, BLOCK_M, BLOCK_N)
                    _store(
                        y, total, first, left, n, N, y_stride, alive, PRECISION, BLOCK_M, BLOCK_N
                    )

    if (program == 0) & (alive != 0):
        at = flag_row(epoch, 0, num_rows, WORLD)
        wait_all(own, error, at, epoch, WORLD, LANES, TIMEOUT_NS)
    finish(own, epoch, num_programs)
