"""matmul_all_reduce beside F.linear and dist.all_reduce."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from on_ranks import compare_on_ranks

from mcp_kernels import matmul_all_reduce

# (rows, in features of a rank, out features): decode, a small and a larger layer.
SHAPES = [(1, 1024, 2048), (64, 1024, 2048), (512, 128, 2048), (512, 176, 128)]


def make(rank, world, shape):
    rows, in_features, out_features = shape
    x, weight = torch.randn(rows, in_features), torch.randn(out_features, in_features)

    def torch_linear_all_reduce():
        y = torch.nn.functional.linear(x, weight)
        dist.all_reduce(y)
        return y

    return {"ours": lambda: matmul_all_reduce(x, weight), "torch": torch_linear_all_reduce}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_matmul_all_reduce(benchmark, shape):
    rows, in_features, out_features = shape
    num_bytes = 4 * (rows * in_features + in_features * out_features + rows * out_features)
    compare_on_ranks(benchmark, make, shape, num_bytes=num_bytes)
