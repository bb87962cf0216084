"""Start of the fused gather and matmul: tile by size, windows of rows that fit a slot.

As for the reduction, all cuts follow from numbers that every rank has.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from mcp_kernels.symmetric.layout import windows
from mcp_kernels.symmetric.peers import Peers
from mcp_kernels.triton.all_gather_matmul_kernel import _all_gather_matmul_kernel
from mcp_kernels.triton.flash_attn_launch import precision
from mcp_kernels.triton.matmul_reduce_launch import GROUP_M, Product, choose_tile
from mcp_kernels.triton.symmetric_launch import Launch, Tile

# A tile's rows come in 16 pieces, so that all programs push: a shard has few tiles of rows.
PIECES_PER_TILE = 16
# Columns copied at a time: with the 8 rows of a piece, 16 elements a thread.
BLOCK_C = 512


def all_gather_matmul(
    product: Product,
    y: Tensor,
    gathered: Tensor | None,
    peers: Peers,
    *,
    part_rows: int | None = None,
    tile: Tile | None = None,
) -> None:
    """Write the gathered rows times the weight into ``y``, and the gathered rows into ``gathered``.

    Args:
        product: this rank's rows of x, weight and bias; here every rank adds its own bias.
        y: ``[size, N]`` contiguous. Rank r's rows are ``part_rows`` from the r-th multiple of it
            on, as far as there are some.
        gathered: ``[size, K]`` contiguous, or None where nobody needs it.
        peers: the channel.
        part_rows: rows of a rank; ``ceil(size / W)`` by default.
        tile: block sizes; by default those for a rank's rows.

    Raises:
        ValueError: a slot does not hold a row of each rank.

    Cost: one kernel for each ``slot_bytes`` of the gathered rows; each rank writes (W-1) times its
    rows to peers.
    """
    for launch in launches(product, y, gathered, peers, part_rows, tile):
        launch.run(y.device)


def launches(
    product: Product,
    y: Tensor,
    gathered: Tensor | None,
    peers: Peers,
    part_rows: int | None = None,
    tile: Tile | None = None,
) -> Iterator[Launch]:
    """The kernels of one call, in order."""
    x, weight = product.x, product.weight
    bias = None if product.bias is None else product.bias.contiguous()
    size, features = y.shape
    part_rows = -(-size // peers.world) if part_rows is None else part_rows
    tile = tile or choose_tile(part_rows, y.dtype)
    push = max(1, tile.block_m // PIECES_PER_TILE)
    for start, window in windows(part_rows, _most_rows(x, peers, push)):
        down, across = -(-window // tile.block_m), -(-features // tile.block_n)
        num_programs = max(1, min(max(down * across, -(-window // push)), peers.num_programs))
        args = {
            "x": x[min(start, x.shape[0]) :],
            "weight": weight,
            "bias": bias,
            "y": y,
            "gathered": gathered,
            "buffers": peers.buffers,
            "error": peers.error,
            "rank": peers.rank,
            "N": features,
            "K": x.shape[1],
            "strides": (*x.stride(), *weight.stride()),
            "y_stride": y.stride(0),
            "cut": (size, part_rows, start, window),
            "num_m": down,
            "num_n": across,
            "group": GROUP_M,
            "num_rows": peers.layout.num_rows,
            "slots_at": peers.layout.slots_at,
            "slot_bytes": peers.layout.slot_bytes,
            "first_program": 0,
            "num_programs": num_programs,
        }
        constants = {
            "HAS_BIAS": bias is not None,
            "HAS_GATHERED": gathered is not None,
            "PRECISION": precision(x),
            "WORLD": peers.world,
            "LANES": peers.lanes,
            "TIMEOUT_NS": peers.timeout_ns,
            "PUSH": push,
            "BLOCK_C": BLOCK_C if tile.block_m > 16 else 4 * BLOCK_C,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
        }
        yield Launch(_all_gather_matmul_kernel, num_programs, args, constants, tile)


def _most_rows(x: Tensor, peers: Peers, push: int) -> int:
    """Rows of each rank that a slot and the flags hold."""
    row_bytes = max(1, x.shape[1]) * x.element_size()
    rows = min(
        peers.layout.slot_bytes // (peers.world * row_bytes), push * (peers.layout.num_rows - 1)
    )
    if rows < 1:
        raise ValueError(
            f"all_gather_matmul: slot_bytes must hold a row of {row_bytes} bytes of each of "
            f"{peers.world} ranks, got {peers.layout.slot_bytes}"
        )
    return rows
