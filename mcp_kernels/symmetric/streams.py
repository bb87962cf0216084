"""Tall products in pieces: cuBLAS on one stream, the collective of the piece before on another.

The pieces are those of ``ops/_overlap.py``, which serves every other group; here the collectives
are ours, over symmetric memory.

Source of the decomposition: torch's async tensor parallelism, from its description.
"""

from __future__ import annotations

from torch import Tensor

from mcp_kernels.ops import _column_backward, _comm, _overlap
from mcp_kernels.ops._overlap_cut import cut_product
from mcp_kernels.symmetric.agree import agreement
from mcp_kernels.symmetric.scatter_gather import carrier_of

# Rows from which a piece of a quarter still fills a GPU of 132 multiprocessors with 128 x 128 tiles
# at 4096 features.
MIN_ROWS = 4096


def _has_cuda_op(x: Tensor, group: str) -> bool:
    found = _comm.resolve(group)
    return found is not None and x.is_cuda and agreement(found, x.device).has_cuda_op


def has_streams(x: Tensor, columns: int, group: str) -> bool:
    """Whether ``[M, columns]`` is summed this way: tall, and the CUDA all-reduce is everywhere."""
    rows = x.shape[:-1].numel()
    if rows < MIN_ROWS or cut_product(rows, columns, rows * columns * x.element_size()) is None:
        return False
    return _has_cuda_op(x, group)


def matmul_all_reduce_on_streams(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str
) -> Tensor:
    """The ranks' summed ``x @ weight.T + bias``."""
    carrier = carrier_of("matmul_all_reduce", group, x.device, aside=True)
    own = bias if carrier.rank == 0 else None  # counted once
    return _overlap.sum_of_product(x, weight, own, carrier)


def has_scatter_streams(x: Tensor, columns: int, group: str, dim: int) -> bool:
    """As ``has_streams`` for a sum that is scattered, equally, along rows."""
    _, world = _comm.place(group)
    rows = x.shape[:-1].numel()
    if rows < MIN_ROWS or dim == x.dim() - 1 or x.shape[dim] % world:
        return False
    if cut_product(rows // world, columns, rows * columns * x.element_size()) is None:
        return False
    return _has_cuda_op(x, group)


def matmul_reduce_scatter_on_streams(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, dim: int
) -> Tensor:
    """This rank's part along ``dim`` of the ranks' summed product."""
    carrier = carrier_of("matmul_reduce_scatter", group, x.device, aside=True)
    own = bias if carrier.rank == 0 else None  # counted once
    return _overlap.scatter_of_product(x, weight, own, carrier, dim)


def all_gather_matmul_backward(
    dys: list[Tensor],
    weights: list[Tensor],
    x: Tensor,
    needs: list[bool],
    group: str,
    gather_dim: int | None,
    gather_size: int | None,
    is_gathered: bool,
) -> tuple[Tensor, list[Tensor]]:
    """The body on the CUDA key: x comes under dx, dx is summed under the dweights."""
    carrier = None
    if group:
        carrier = carrier_of("all_gather_matmul_backward", group, x.device, aside=True)
    args = (dys, weights, x, needs, carrier, gather_dim, gather_size, is_gathered)
    return _column_backward.carried(*args)
