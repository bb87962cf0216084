"""The bodies of ``matmul_reduce_scatter`` and its backward on GPUs that reach each other.

Small and middle products go through the fused kernel; tall ones in pieces, cuBLAS on one stream and
the CUDA reduce-scatter of the piece before on another. float64 is cuBLAS and one CUDA
reduce-scatter. Backward multiplies rows of dy while they arrive, as ``all_gather_matmul`` does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcp_kernels.ops import _comm
from mcp_kernels.ops._linear import linear, linear_backward
from mcp_kernels.symmetric.channel import channel
from mcp_kernels.symmetric.peers import Peers
from mcp_kernels.symmetric.scatter_gather import carrier_of
from mcp_kernels.symmetric.streams import has_scatter_streams, matmul_reduce_scatter_on_streams
from mcp_kernels.triton.all_gather_matmul import gather
from mcp_kernels.triton.matmul_reduce_launch import Product
from mcp_kernels.triton.matmul_reduce_launch import matmul_reduce_scatter as launch


def matmul_reduce_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, scatter_dim: int
) -> Tensor:
    """The body of ``matmul_reduce_scatter`` on the CUDA key; arguments as there."""
    if not group:
        return linear(x, weight, bias)
    if has_scatter_streams(x, weight.shape[0], group, scatter_dim):
        return matmul_reduce_scatter_on_streams(x, weight, bias, group, scatter_dim)
    if x.dtype == torch.float64:  # no tensor cores for it in a Triton matmul
        carrier = carrier_of("reduce_scatter", group, x.device)
        product = linear(x, weight, bias if carrier.rank == 0 else None)
        return _comm.start_scatter_sum(product, carrier, scatter_dim)()
    with channel("matmul_reduce_scatter", group, x.device) as peers:
        return scatter(x, weight, bias, peers, scatter_dim)


def scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None, peers: Peers, scatter_dim: int
) -> Tensor:
    """The op by the ranks of ``peers``: rows of the product in scatter order, then the kernel."""
    if scatter_dim == x.dim() - 1:
        return _scatter_features(x, weight, bias, peers)
    first = x.movedim(scatter_dim, 0)
    size, others = first.shape[0], first.shape[1:-1]
    sizes = _comm.split_sizes(size, peers.world)
    product = Product(first.reshape(size * others.numel(), x.shape[-1]), weight, bias)
    y = x.new_empty(sizes[peers.rank] * others.numel(), weight.shape[0])
    if size * others.numel() * weight.shape[0]:
        launch(product, y, peers, part_rows=sizes[0] * others.numel())
    parts = torch.ops.aten._unsafe_view(y, [sizes[peers.rank], *others, weight.shape[0]])
    return parts if scatter_dim == 0 else parts.movedim(0, scatter_dim).contiguous()


def _scatter_features(x: Tensor, weight: Tensor, bias: Tensor | None, peers: Peers) -> Tensor:
    """Out features as rows: ``weight @ x.T``, whose rows are scattered.

    The bias of the first rank is a column more of its weight, against ones in x: one rounding.
    """
    lead = x.shape[:-1]
    rows = x.reshape(lead.numel(), x.shape[-1])
    if bias is not None and peers.rank == 0:
        rows = torch.cat([rows, rows.new_ones(rows.shape[0], 1)], dim=1)
        weight = torch.cat([weight, bias[:, None]], dim=1)
    sizes = _comm.split_sizes(weight.shape[0], peers.world)
    y = x.new_empty(sizes[peers.rank], lead.numel())
    if weight.shape[0] * lead.numel():
        launch(Product(weight, rows, None), y, peers, part_rows=sizes[0])
    return y.t().reshape(*lead, sizes[peers.rank]).contiguous()


def matmul_reduce_scatter_backward(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    needs: list[bool],
    group: str,
    dim: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The body of ``matmul_reduce_scatter_backward`` on the CUDA key; arguments as there."""
    assert weight is not None  # else refused
    with channel("matmul_reduce_scatter_backward", group, dy.device) as peers:
        return gradients(dy, x, weight, needs, peers, dim, size)


def gradients(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor,
    needs: list[bool],
    peers: Peers,
    dim: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The op by the ranks of ``peers``: dx while dy arrives, then the rest from all of dy."""
    (dx,), full = gather(dy, [weight.t()], [], peers, dim, size, save_gathered=True)
    _, dw, db = linear_backward(full, x, None, (False, needs[1], needs[2]))
    nothing = dy.new_empty(0)
    return dx, nothing if dw is None else dw, nothing if db is None else db
