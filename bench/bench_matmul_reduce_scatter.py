"""matmul_reduce_scatter in shared memory beside F.linear and reduce_scatter on gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from on_ranks import compare_on_ranks, shm_group

from mcp_kernels import matmul_reduce_scatter

# (batch, sequence, in features of a rank, out features)
SHAPES = [(4, 128, 64, 128), (4, 128, 176, 128), (1, 512, 1024, 1024)]


class TorchReduceScatter(torch.autograd.Function):
    """What one writes with torch.distributed: reduce-scatter along dim 1, all-gather back."""

    @staticmethod
    def forward(ctx, y):
        parts = [part.contiguous() for part in y.chunk(dist.get_world_size(), 1)]
        out = torch.empty_like(parts[0])
        dist.reduce_scatter(out, parts)
        return out

    @staticmethod
    def backward(ctx, *grads):
        parts = [torch.empty_like(grads[0]) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grads[0].contiguous())
        return torch.cat(parts, 1)


def make(rank, world, shape, has_backward):
    batch, rows, in_features, out_features = shape
    x = torch.randn(batch, rows, in_features, requires_grad=has_backward)
    weight = torch.randn(out_features, in_features, requires_grad=has_backward)

    group = shm_group(world)

    def finish(y):
        if not has_backward:
            return y
        dx, dw = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
        return torch.cat([dx.flatten(), dw.flatten()])

    return {
        "ours": lambda: finish(matmul_reduce_scatter(x, weight, scatter_dim=1, group=group)),
        "torch": lambda: finish(TorchReduceScatter.apply(torch.nn.functional.linear(x, weight))),
    }


@pytest.mark.parametrize("has_backward", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_matmul_reduce_scatter(benchmark, shape, has_backward):
    batch, rows, in_features, out_features = shape
    elements = batch * rows * (in_features + out_features) + in_features * out_features
    compare_on_ranks(benchmark, make, shape, has_backward, num_bytes=4 * elements)
