"""all_gather_matmul of three weights beside dist.all_gather and F.linear, as a user writes it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from on_ranks import compare_on_ranks, shm_group

from mcp_kernels import all_gather_matmul

# (batch, sequence, in features, out features of a rank in each of three weights)
SHAPES = [(4, 128, 128, 64), (4, 128, 128, 176), (1, 512, 1024, 512)]


class TorchAllGather(torch.autograd.Function):
    """What one writes with torch.distributed: all-gather along dim 1, reduce-scatter back."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, *grads):
        parts = [part.contiguous() for part in grads[0].chunk(dist.get_world_size(), 1)]
        out = torch.empty_like(parts[0])
        dist.reduce_scatter(out, parts)
        return out


def make(rank, world, shape, has_backward):
    batch, rows, in_features, out_features = shape
    x = torch.randn(batch, rows // world, in_features, requires_grad=has_backward)
    weights = [torch.randn(out_features, in_features, requires_grad=has_backward) for _ in range(3)]

    def torch_linears():
        gathered = TorchAllGather.apply(x)
        return [torch.nn.functional.linear(gathered, weight) for weight in weights]

    group = shm_group(world)

    def finish(ys):
        results = ys
        if has_backward:
            results = torch.autograd.grad(ys, (x, *weights), [torch.ones_like(y) for y in ys])
        return torch.cat([t.flatten() for t in results])

    return {
        "ours": lambda: finish(all_gather_matmul(x, weights, gather_dim=1, group=group)),
        "torch": lambda: finish(torch_linears()),
    }


@pytest.mark.parametrize("has_backward", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_all_gather_matmul(benchmark, shape, has_backward):
    batch, rows, in_features, out_features = shape
    elements = batch * rows * (in_features + 3 * out_features) + 3 * in_features * out_features
    compare_on_ranks(benchmark, make, shape, has_backward, num_bytes=4 * elements)
