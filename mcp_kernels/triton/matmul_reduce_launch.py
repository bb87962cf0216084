"""Start of the fused matmul and reduction: form and tile by size, pieces that fit a slot.

All that is decided here follows from numbers that every rank has (rows, out features, type, world,
layout, programs), never from its own K, strides or addresses: ranks must cut alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mcp_kernels.symmetric.layout import windows
from mcp_kernels.symmetric.peers import Peers
from mcp_kernels.triton.flash_attn_launch import precision
from mcp_kernels.triton.matmul_reduce import _matmul_reduce_kernel
from mcp_kernels.triton.symmetric_launch import Launch, Tile

ONE_SHOT, TWO_SHOT, SCATTER = 0, 1, 2
# Tile rows that share weights in the L2 cache, as in Triton's own matmul tutorial.
GROUP_M = 8
# Bytes of the product up to which reading it W times costs less than a second exchange of flags:
# where published one-shot all-reduces stop winning on NVLink (vLLM: 512 KiB up to 4 ranks, 256 KiB
# up to 8). Two ranks read as much either way.
ONE_SHOT_BYTES = {4: 512 << 10, 8: 256 << 10}


def choose_tile(rows: int, dtype: torch.dtype) -> Tile:
    """A tile for ``rows`` rows of x.

    The shared memory of a stage is (block_m + block_n) * block_k elements: 32 KiB for the largest,
    3 stages of it fit an A100 and an H100.
    """
    block_k = 64 if dtype.itemsize == 2 else 32
    if rows <= 16:
        return Tile(16, 64, 2 * block_k, 4, 4)
    if rows <= 64:
        return Tile(64, 64, block_k, 4, 4)
    if dtype.itemsize > 2:
        return Tile(128, 64, 16, 8, 3)  # exact products take more registers; a larger one spills
    return Tile(128, 128, block_k, 8, 3)


def choose_form(rows: int, features: int, dtype: torch.dtype, world: int) -> int:
    """ONE_SHOT or TWO_SHOT for an all-reduce of ``[rows, features]``."""
    if world <= 2:
        return ONE_SHOT
    most = next((most for ranks, most in ONE_SHOT_BYTES.items() if world <= ranks), 0)
    return ONE_SHOT if rows * features * dtype.itemsize <= most else TWO_SHOT


@dataclass(frozen=True, slots=True)
class Product:
    """``x @ weight.T + bias`` as the kernel takes it."""

    x: Tensor
    """``[M, K]``, any strides."""
    weight: Tensor
    """``[N, K]``, any strides, x's dtype."""
    bias: Tensor | None
    """``[N]``; where products are summed, only the first rank adds it."""

    def columns(self, first: int, count: int) -> Product:
        """The product of ``count`` out features from ``first`` on."""
        last = first + count
        bias = None if self.bias is None else self.bias[first:last]
        return Product(self.x, self.weight[first:last], bias)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one kernel does: a window of rows and of out features."""

    rows: tuple[int, int]
    """(first, count); rows of each part for SCATTER."""
    columns: tuple[int, int]


def pieces(
    rows: int, features: int, peers: Peers, owners: int, tile: Tile, itemsize: int
) -> Iterator[Piece]:
    """The pieces of a product whose tiles, of all ``owners``, fit a slot and the flags.

    Args:
        rows: rows of an owner for SCATTER, else of the product.
        features: out features.
        peers: whose slots and flags they have to fit.
        owners: 1 where every rank has all tiles, else W.
        tile: the block sizes.
        itemsize: bytes of an element.

    Returns:
        An iterator of ``Piece``; at least one.

    Raises:
        ValueError: a slot holds no tile for each owner.
    """
    in_slot = peers.layout.slot_bytes // (tile.size * itemsize)
    per_owner = min(in_slot // owners, (peers.layout.num_rows - 1) // 2)
    if per_owner < 1:
        raise ValueError(
            f"matmul: slot_bytes must hold a tile of {tile.size * itemsize} bytes for each of "
            f"{owners} ranks, got {peers.layout.slot_bytes}"
        )
    num_n = -(-features // tile.block_n)
    wide = min(max(1, num_n), per_owner)
    for column in windows(features, wide * tile.block_n):
        for row in windows(rows, per_owner // wide * tile.block_m):
            yield Piece(row, column)


def matmul_all_reduce(
    product: Product, y: Tensor, peers: Peers, *, form: int | None = None, tile: Tile | None = None
) -> None:
    """Write the ranks' summed product into ``y``, ``[M, N]`` contiguous.

    Cost: one kernel for each ``slot_bytes`` of the product; reads (W-1) M N elements from peers in
    one shot, 2 (W-1)/W M N in two.
    """
    rows, features = y.shape
    tile = tile or choose_tile(rows, y.dtype)
    form = choose_form(rows, features, y.dtype, peers.world) if form is None else form
    owners = 1 if form == ONE_SHOT else peers.world
    # An owner's part of the slot is whole, so at most a tile each is left over.
    for piece in pieces(rows, features, peers, 1, tile, y.element_size()):
        (first, count), (column, width) = piece.rows, piece.columns
        target = y[first : first + count, column : column + width]
        part = product.columns(column, width)
        part = Product(part.x[first : first + count], part.weight, part.bias)
        down, across = -(-count // tile.block_m), -(-width // tile.block_n)
        parts = (count, 0, 0, 0, down, across, GROUP_M)
        per_owner = -(-down * across // owners)
        tiles = down * across
        launch_of(part, target, peers, form, tile, parts, tiles, per_owner).run(y.device)


def matmul_reduce_scatter(
    product: Product,
    y: Tensor,
    peers: Peers,
    *,
    part_rows: int | None = None,
    tile: Tile | None = None,
) -> None:
    """Write this rank's rows of the ranks' summed product into ``y``, contiguous.

    Each rank gets ``part_rows`` rows, the last ones fewer or none; ``ceil(M / W)`` by default.

    Cost: one kernel for each ``slot_bytes`` of the product; reads (W-1)/W M N elements from peers.
    """
    rows, features = product.x.shape[0], product.weight.shape[0]
    part_rows = -(-rows // peers.world) if part_rows is None else part_rows
    tile = tile or choose_tile(part_rows, y.dtype)
    for piece in pieces(part_rows, features, peers, peers.world, tile, y.element_size()):
        (first, count), (column, width) = piece.rows, piece.columns
        target, part = y[:, column : column + width], product.columns(column, width)
        down, across = -(-count // tile.block_m), -(-width // tile.block_n)
        parts = (rows, part_rows, first, count, down, across, GROUP_M)
        per_owner = down * across
        tiles = peers.world * per_owner
        launch_of(part, target, peers, SCATTER, tile, parts, tiles, per_owner).run(y.device)


def launch_of(
    product: Product,
    y: Tensor,
    peers: Peers,
    form: int,
    tile: Tile,
    parts: tuple[int, ...],
    tiles: int,
    per_owner: int,
) -> Launch:
    """The kernel of one piece with its arguments; ``parts`` is as ``_tile_rows`` takes it."""
    x, weight = product.x, product.weight
    bias = None if product.bias is None or peers.rank else product.bias.contiguous()
    num_programs = max(1, min(per_owner, peers.num_programs))
    # The switch adds a unit of 16 bytes once only where no two threads hold the same one.
    fills_warps = tile.size * y.element_size() // 16 >= 32 * tile.num_warps
    args = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "y": y,
        "buffers": peers.buffers,
        "error": peers.error,
        "multicast": peers.multicast,
        "rank": peers.rank,
        "N": weight.shape[0],
        "K": x.shape[1],
        "strides": (*x.stride(), *weight.stride()),
        "y_stride": y.stride(0),
        "parts": parts,
        "tiles": tiles,
        "per_owner": per_owner,
        "num_rows": peers.layout.num_rows,
        "slots_at": peers.layout.slots_at,
        "slot_bytes": peers.layout.slot_bytes,
        "first_program": 0,
        "num_programs": num_programs,
    }
    constants = {
        "FORM": form,
        "MULTICAST": form == TWO_SHOT and peers.multicast != 0 and fills_warps,
        "HAS_BIAS": bias is not None,
        "PRECISION": precision(x),
        "WORLD": peers.world,
        "LANES": peers.lanes,
        "TIMEOUT_NS": peers.timeout_ns,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
    }
    return Launch(_matmul_reduce_kernel, num_programs, args, constants, tile)
