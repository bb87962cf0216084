"""The body of ``all_gather_matmul`` on GPUs that reach each other.

Small and middle inputs go through the fused kernel, tall ones through copies and cuBLAS on two
streams. float64, and a gather along the in features, are one CUDA all-gather and cuBLAS.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcp_kernels.ops import _comm
from mcp_kernels.ops._linear import linear
from mcp_kernels.symmetric.channel import channel
from mcp_kernels.symmetric.peers import Peers
from mcp_kernels.symmetric.scatter_gather import carrier_of
from mcp_kernels.triton.all_gather_matmul_launch import all_gather_matmul as launch
from mcp_kernels.triton.all_gather_steps import fits, gather_on_streams
from mcp_kernels.triton.matmul_reduce_launch import Product

# Rows of a rank whose product still fills a GPU of 132 multiprocessors at 4096 features.
MIN_ROWS = 1024


def all_gather_matmul(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    group: str,
    gather_dim: int | None,
    gather_size: int | None,
    save_gathered: bool,
) -> tuple[list[Tensor], Tensor]:
    """The body of ``all_gather_matmul`` on the CUDA key; arguments as there, checked before."""
    if not group or gather_dim is None:  # this rank holds all of x
        given = biases or [None] * len(weights)
        ys = [linear(x, weight, bias) for weight, bias in zip(weights, given, strict=True)]
        return ys, x.new_empty(0)
    if x.dtype == torch.float64 or gather_dim == x.dim() - 1:
        carrier = carrier_of("all_gather", group, x.device)
        gathered = _comm.start_gather(x, carrier, gather_dim, gather_size)()
        given = biases or [None] * len(weights)
        ys = [linear(gathered, weight, bias) for weight, bias in zip(weights, given, strict=True)]
        return ys, gathered if save_gathered else x.new_empty(0)
    with channel("all_gather_matmul", group, x.device) as peers:
        ys, gathered = gather(x, weights, biases, peers, gather_dim, gather_size, save_gathered)
    return ys, gathered if save_gathered else x.new_empty(0)


def gather(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    peers: Peers,
    gather_dim: int,
    gather_size: int | None,
    save_gathered: bool,
) -> tuple[list[Tensor], Tensor]:
    """The op by the ranks of ``peers``, for a ``gather_dim`` that is not the last.

    The first weight is multiplied while rows arrive; further ones use the gathered rows.
    """
    first = x.movedim(gather_dim, 0)
    others = first.shape[1:-1]
    size = peers.world * first.shape[0] if gather_size is None else gather_size
    part = -(-size // peers.world) * others.numel()
    rows = first.reshape(first.shape[0] * others.numel(), x.shape[-1])
    count = size * others.numel()
    keeps = save_gathered or len(weights) > 1
    gathered = x.new_empty(count, x.shape[-1]) if keeps else None
    y = x.new_empty(count, weights[0].shape[0])
    if count:
        bias = biases[0] if biases else None
        if part >= MIN_ROWS and fits(part, x.shape[-1], x.element_size(), peers):
            gathered = x.new_empty(count, x.shape[-1]) if gathered is None else gathered
            gather_on_streams(rows, weights[0], bias, y, gathered, peers, part)
        else:
            launch(Product(rows, weights[0], bias), y, gathered, peers, part_rows=part)
    ys = [y]
    if gathered is not None:
        given = biases or [None] * len(weights)
        ys += [linear(gathered, w, b) for w, b in zip(weights[1:], given[1:], strict=True)]
    ys = [_in_place_of(y, size, others, gather_dim) for y in ys]
    if gathered is None:
        return ys, x.new_empty(0)
    return ys, _in_place_of(gathered, size, others, gather_dim)


def _in_place_of(rows: Tensor, size: int, others: torch.Size, dim: int) -> Tensor:
    """``[size * others, F]`` with the gathered dimension back where it was, contiguous."""
    joined = torch.ops.aten._unsafe_view(rows, [size, *others, rows.shape[-1]])
    return joined if dim == 0 else joined.movedim(0, dim).contiguous()
