"""The body of ``matmul_all_reduce`` on GPUs that reach each other.

Small and middle products go through the fused kernel. Tall ones, where cuBLAS is ahead of a Triton
matmul by more than the overlap is worth, go in pieces: cuBLAS on the caller's stream, the CUDA
all-reduce of the piece before on a second one. float64 is cuBLAS and one CUDA all-reduce.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcp_kernels.ops._linear import linear
from mcp_kernels.symmetric.channel import channel
from mcp_kernels.symmetric.peers import Peers
from mcp_kernels.symmetric.scatter_gather import carrier_of
from mcp_kernels.symmetric.streams import has_streams, matmul_all_reduce_on_streams
from mcp_kernels.triton.matmul_reduce_launch import Product
from mcp_kernels.triton.matmul_reduce_launch import matmul_all_reduce as launch


def matmul_all_reduce(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
    """The body of ``matmul_all_reduce`` on the CUDA key; arguments as there, checked before."""
    if not group:
        return linear(x, weight, bias)
    if has_streams(x, weight.shape[0], group):
        return matmul_all_reduce_on_streams(x, weight, bias, group)
    if x.dtype == torch.float64:  # no tensor cores for it in a Triton matmul
        carrier = carrier_of("all_reduce", group, x.device)
        return carrier.start_sum_(linear(x, weight, bias if carrier.rank == 0 else None))()
    lead = x.shape[:-1]
    y = x.new_empty(lead.numel(), weight.shape[0])
    if y.numel():
        product = Product(x.reshape(lead.numel(), x.shape[-1]), weight, bias)
        with channel("matmul_all_reduce", group, x.device) as peers:
            fused(product, y, peers)
    return torch.ops.aten._unsafe_view(y, [*lead, weight.shape[0]])


def fused(product: Product, y: Tensor, peers: Peers) -> None:
    """The fused kernel, on its own channel."""
    launch(product, y, peers)
