"""Gather and matmul by streams: copies and flags on one, cuBLAS on the other.

    offer   the own rows into the own slot, a flag for every peer
    pull    the rows of one peer from its slot, once its flag is up (second stream)
    mm      the rows that are here: the own ones first, then in the order of the pulls
    end     count the call

For tall inputs, where cuBLAS is ahead of a Triton matmul by more than finer overlap is worth. A
slot holds the rank's own rows; program p copies the same share in ``offer`` and ``pull``, so its
flag speaks for it. Every rank pulls from every peer, so a call that ends has heard from all.

Source of the decomposition: torch's async tensor parallelism, from its description.
"""

# ruff: noqa: ANN001, ANN202, PLR0913
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcp_kernels.symmetric.peers import Peers
from mcp_kernels.triton.symmetric_flags import (
    DEAD,
    epoch_of,
    finish,
    flag_row,
    publish,
    wait_one,
    words_of,
)
from mcp_kernels.triton.symmetric_launch import Launch, Tile
from mcp_kernels.triton.tile_order import source_at

# Programs of a copy: enough to fill NVLink, few enough to leave the multiprocessors to cuBLAS.
COPY_PROGRAMS = 16
# Elements a program copies at a time: 32 a thread.
COPY_TILE = Tile(16, 512, 0, 8, 2)
_ROWS, _COLUMNS = tl.constexpr(COPY_TILE.block_m), tl.constexpr(COPY_TILE.block_n)


@triton.jit
def _copy_share(to, to_stride, source, row_stride, column_stride, rows, K, program, programs):
    """Copy this program's blocks of ``[rows, K]``."""
    for block in range(program, tl.cdiv(rows, _ROWS), programs):
        row = block * _ROWS + tl.arange(0, _ROWS)
        wide = row.to(tl.int64)[:, None]
        for start in range(0, K, _COLUMNS):
            column = (start + tl.arange(0, _COLUMNS))[None, :]
            inside = (row < rows)[:, None] & (column < K)
            at = source + wide * row_stride + column.to(tl.int64) * column_stride
            tl.store(to + wide * to_stride + column, tl.load(at, mask=inside), mask=inside)


@triton.jit
def _offer_kernel(
    x, buffers, error, rank, rows, K, strides, num_rows, slots_at, slot_bytes, programs,
    WORLD: tl.constexpr, LANES: tl.constexpr, TIMEOUT_NS: tl.constexpr,
):  # fmt: skip
    own = words_of(buffers, rank)
    epoch = epoch_of(own)
    slot = tl.load(buffers + rank) + slots_at + (epoch % 2) * slot_bytes
    slot = slot.to(tl.pointer_type(x.dtype.element_ty), bitcast=True)
    program = tl.program_id(0)
    _copy_share(slot, K, x, strides[0], strides[1], rows, K, program, programs)
    if tl.load(own + DEAD) == 0:
        at = flag_row(epoch, 1 + program, num_rows, WORLD) + rank
        publish(buffers, at, epoch, WORLD, LANES)


@triton.jit
def _pull_kernel(
    gathered, buffers, error, rank, source, rows, K, num_rows, slots_at, slot_bytes, programs,
    WORLD: tl.constexpr, LANES: tl.constexpr, TIMEOUT_NS: tl.constexpr,
):  # fmt: skip
    own = words_of(buffers, rank)
    epoch = epoch_of(own)
    program = tl.program_id(0)
    alive = (tl.load(own + DEAD) == 0).to(tl.int32)
    if alive != 0:
        at = flag_row(epoch, 1 + program, num_rows, WORLD)
        alive = wait_one(own, error, at, source, epoch, TIMEOUT_NS)
    slot = tl.load(buffers + source) + slots_at + (epoch % 2) * slot_bytes
    slot = slot.to(tl.pointer_type(gathered.dtype.element_ty), bitcast=True)
    _copy_share(gathered, K, slot, K, 1, rows, K, program, programs)
    if alive == 0:
        for row in range(program, rows, programs):
            for start in range(0, K, _COLUMNS):
                column = start + tl.arange(0, _COLUMNS)
                nan = tl.full((_COLUMNS,), float("nan"), tl.float32)
                at = gathered + (tl.zeros((_COLUMNS,), tl.int64) + row) * K + column
                tl.store(at, nan.to(gathered.dtype.element_ty), mask=column < K)


@triton.jit
def _end_kernel(buffers, rank):
    own = words_of(buffers, rank)
    finish(own, epoch_of(own), 1)


def offer_launch(x: Tensor, peers: Peers) -> Launch:
    """The own rows ``x [rows, K]``, any strides, into the own slot."""
    programs = min(COPY_PROGRAMS, peers.num_programs)
    args = {"x": x, **_common(peers), "rows": x.shape[0], "K": x.shape[1], "strides": x.stride()}
    return Launch(
        _offer_kernel, programs, args | {"programs": programs}, _constants(peers), COPY_TILE
    )


def pull_launch(rows: Tensor, source: int, peers: Peers) -> Launch:
    """The rows of ``source`` into contiguous ``rows``."""
    programs = min(COPY_PROGRAMS, peers.num_programs)
    args = {"gathered": rows, **_common(peers), "source": source}
    args |= {"rows": rows.shape[0], "K": rows.shape[1], "programs": programs}
    return Launch(_pull_kernel, programs, args, _constants(peers), COPY_TILE)


def _common(peers: Peers) -> dict[str, object]:
    return {
        "buffers": peers.buffers,
        "error": peers.error,
        "rank": peers.rank,
        "num_rows": peers.layout.num_rows,
        "slots_at": peers.layout.slots_at,
        "slot_bytes": peers.layout.slot_bytes,
    }


def _constants(peers: Peers) -> dict[str, object]:
    return {"WORLD": peers.world, "LANES": peers.lanes, "TIMEOUT_NS": peers.timeout_ns}


def fits(rows: int, features: int, itemsize: int, peers: Peers) -> bool:
    """Whether a rank's ``[rows, features]`` fit its slot, and the flags the programs."""
    return (
        rows * features * itemsize <= peers.layout.slot_bytes
        and peers.layout.num_rows > COPY_PROGRAMS
    )


def gather_on_streams(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    gathered: Tensor,
    peers: Peers,
    part_rows: int,
) -> None:
    """Write the gathered rows into ``gathered`` and their product into ``y``.

    Args:
        x: this rank's rows ``[rows, K]``.
        weight: ``[N, K]``.
        bias: ``[N]``.
        y: ``[size, N]`` contiguous.
        gathered: ``[size, K]`` contiguous.
        peers: the channel; ``fits(part_rows, K, ...)``.
        part_rows: rows of a rank; the last ones have fewer or none.
    """
    parts = gathered.split(part_rows)
    parts = [*parts, *[gathered[:0]] * (peers.world - len(parts))]
    targets = y.split(part_rows)
    targets = [*targets, *[y[:0]] * (peers.world - len(targets))]
    order = [source_at.fn(peers.rank, turn, peers.world) for turn in range(peers.world)]
    offer_launch(x, peers).run(x.device)
    arrived = _pulls(order[1:], parts, peers)
    for source in order:
        if source == peers.rank:
            parts[source].copy_(x)
        elif arrived:
            torch.cuda.current_stream(x.device).wait_event(arrived[source])
        if bias is None:
            torch.mm(parts[source], weight.t(), out=targets[source])
        else:
            torch.addmm(bias, parts[source], weight.t(), out=targets[source])
    Launch(_end_kernel, 1, {"buffers": peers.buffers, "rank": peers.rank}, {}, COPY_TILE).run(
        x.device
    )


_second_streams: dict[int, torch.cuda.Stream] = {}


def _pulls(order: list[int], parts: list[Tensor], peers: Peers) -> dict[int, torch.cuda.Event]:
    """Start the pulls, on a second stream where there are streams; an event for each source."""
    device = peers.buffers.device
    if device.type != "cuda":
        for source in order:
            pull_launch(parts[source], source, peers).run(device)
        return {}
    index = device.index or 0
    if index not in _second_streams:
        _second_streams[index] = torch.cuda.Stream(device)
    second = _second_streams[index]
    second.wait_stream(torch.cuda.current_stream(device))
    arrived = {}
    with torch.cuda.stream(second):
        for source in order:
            pull_launch(parts[source], source, peers).run(device)
            arrived[source] = torch.cuda.Event()
            arrived[source].record(second)
    parts[peers.rank].record_stream(second)
    return arrived
