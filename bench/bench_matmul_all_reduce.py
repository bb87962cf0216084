"""matmul_all_reduce in shared memory beside F.linear and gloo's all-reduce, and F.linear alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from on_ranks import compare_on_ranks, shm_group

from mcp_kernels import all_gather_matmul, matmul_all_reduce

OUT_FEATURES = 2048
# (rows, in features of a rank): decoding, small batches, little work a byte, training.
SHAPES = [(1, 1024), (16, 1024), (64, 1024), (512, 128), (512, 1024), (512, 2048)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
cases = pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shape, dtype) for shape in SHAPES for dtype in DTYPES],
    ids=lambda value: value if isinstance(value, str) else f"{value[0]}x{value[1]}",
)


def make(rank, world, shape, dtype):
    rows, in_features = shape
    torch.manual_seed(rank)
    x = torch.randn(rows, in_features).to(DTYPES[dtype])
    weight = torch.randn(OUT_FEATURES, in_features).to(DTYPES[dtype])
    group = shm_group(world)
    gloo = dist.group.WORLD

    def linear_gloo():
        y = torch.nn.functional.linear(x, weight)
        dist.all_reduce(y, group=gloo)
        return y

    return {
        "ours": lambda: matmul_all_reduce(x, weight, group=group or gloo),
        "linear_gloo": linear_gloo,
        "bare_linear": lambda: torch.nn.functional.linear(x, weight),
    }


def make_backward(rank, world, shape, dtype):
    """Of the layer's other half: the input is whole, its gradient is summed under dweight."""
    rows, in_features = shape
    torch.manual_seed(rank)
    x = torch.randn(rows, OUT_FEATURES).to(DTYPES[dtype]).requires_grad_()
    weight = torch.randn(in_features, OUT_FEATURES).to(DTYPES[dtype]).requires_grad_()
    dy = torch.randn(rows, in_features).to(DTYPES[dtype])
    gloo = dist.group.WORLD
    fused = all_gather_matmul(x, weight, group=shm_group(world) or gloo, gather_dim=None)
    plain = torch.nn.functional.linear(x, weight)

    def backward(y):
        return torch.autograd.grad(y, (x, weight), dy, retain_graph=True)

    def backward_gloo():
        dx, _ = backward(plain)
        dist.all_reduce(dx, group=gloo)
        return dx

    return {
        "ours": lambda: backward(fused)[0],
        "linear_gloo": backward_gloo,
        "bare_linear": lambda: backward(plain)[0],
    }


def compare(benchmark, make, shape, dtype):
    rows, in_features = shape
    elements = rows * in_features + in_features * OUT_FEATURES + rows * OUT_FEATURES
    rounds = 200 if rows <= 64 else 40
    num_bytes = DTYPES[dtype].itemsize * elements
    compare_on_ranks(benchmark, make, shape, dtype, num_bytes=num_bytes, rounds=rounds)


@cases
def bench_matmul_all_reduce(benchmark, shape, dtype):
    compare(benchmark, make, shape, dtype)


@cases
def bench_matmul_all_reduce_backward(benchmark, shape, dtype):
    compare(benchmark, make_backward, shape, dtype)
