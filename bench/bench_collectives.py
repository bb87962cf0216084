"""Differentiable collectives beside torch.distributed's own calls on the same gloo group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from on_ranks import compare_on_ranks

from mcp_kernels import all_gather, all_reduce, reduce_scatter

SHAPES = [(4, 128, 128), (4, 512, 512)]  # 256 KiB and 4 MiB of float32


def make_all_reduce(rank, world, shape):
    x = torch.randn(shape)

    def torch_all_reduce():
        out = x.clone()
        dist.all_reduce(out)
        return out

    return {"ours": lambda: all_reduce(x), "torch": torch_all_reduce}


def make_all_gather(rank, world, shape):
    x = torch.randn(shape).chunk(world, 1)[rank].contiguous()

    def torch_all_gather():
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x)
        return torch.cat(parts, 1)

    return {"ours": lambda: all_gather(x, gather_dim=1), "torch": torch_all_gather}


def make_reduce_scatter(rank, world, shape):
    x = torch.randn(shape)

    def torch_reduce_scatter():
        out = torch.empty_like(x.chunk(world, 1)[rank], memory_format=torch.contiguous_format)
        dist.reduce_scatter(out, [part.contiguous() for part in x.chunk(world, 1)])
        return out

    return {"ours": lambda: reduce_scatter(x, scatter_dim=1), "torch": torch_reduce_scatter}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("make", [make_all_reduce, make_all_gather, make_reduce_scatter])
def bench_collective(benchmark, make, shape):
    compare_on_ranks(benchmark, make, shape, num_bytes=4 * torch.Size(shape).numel())
