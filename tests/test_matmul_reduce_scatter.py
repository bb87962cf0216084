"""matmul_reduce_scatter on 1 to 4 ranks against the unsharded matmul, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_matmul import Case, carried, carriers, cases, count_collectives, make, rounding_bound
from ranks import RankPool

from mcp_kernels import matmul_reduce_scatter
from mcp_kernels.ops import _comm

WORLDS = (1, 2, 3, 4)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _forward(rank: int, world: int) -> None:
    for case in cases():
        for dim in range(len(case.lead) + 1):
            for dtype in DTYPES if dim == 0 else (torch.float64,):
                full = make(case, dtype, world, split="in")
                local = full.local(rank)
                y = matmul_reduce_scatter(local.x, local.weight, local.bias, scatter_dim=dim)
                exact = full.cut(full.exact, rank, dim)
                assert y.dtype == dtype
                assert y.is_contiguous()
                assert y.shape == exact.shape
                bound = full.cut(rounding_bound(full, dtype, partials=world), rank, dim)
                assert ((y.double() - exact).abs() <= bound).all(), (case, dim, dtype)


def _backward(rank: int, world: int) -> None:
    for case in cases():
        for dim in range(len(case.lead) + 1):
            full = make(case, torch.float64, world, split="in", requires_grad=True)
            local = full.local(rank)
            dy = full.dy()
            y = matmul_reduce_scatter(local.x, local.weight, local.bias, scatter_dim=dim)
            got = torch.autograd.grad(y, local.leaves(), full.cut(dy, rank, dim))
            dx, dw, *db = full.grads(dy)
            expected = [full.cut(dx, rank, -1), full.cut(dw, rank, 1), *db]
            for actual, wanted in zip(got, expected, strict=True):
                torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


def _count_collectives(rank: int, world: int) -> tuple[int, int]:
    """Collectives of (forward, backward): the gathered gradient serves x, weight and bias."""
    x, weight = torch.randn(4, 6, requires_grad=True), torch.randn(5, 6, requires_grad=True)
    bias = torch.randn(5, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as forward:
        y = matmul_reduce_scatter(x, weight, bias)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as backward:
        y.sum().backward()
    return count_collectives(forward), count_collectives(backward)


def _native_reduce_scatter(rank: int, world: int) -> None:
    """The path of other backends than gloo, which has a reduce-scatter too."""
    is_gloo: Any = _comm._is_gloo
    _comm._is_gloo = lambda group, x: False
    try:
        _forward(rank, world)
    finally:
        _comm._is_gloo = is_gloo


def _subgroup(rank: int, world: int) -> list[float]:
    pairs: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    x = torch.full((2, 1), rank + 1.0)
    y = matmul_reduce_scatter(x, torch.ones(1, 1), group=pairs[rank // 2])
    return y.flatten().tolist()


def _opcheck(rank: int, world: int) -> None:
    full = make(Case((3, 5), 8, 5, True), torch.float64, world, split="in", requires_grad=True)
    local = full.local(rank)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    op = torch.ops.mcp_kernels.matmul_reduce_scatter.default
    for dim in range(3):
        args = (local.x, local.weight, local.bias, _comm.group_name(None), dim)
        torch.library.opcheck(op, args, test_utils=tests)


@carriers
@pytest.mark.parametrize("world", WORLDS)
def test_forward(ranks: RankPool, carrier: str, world: int) -> None:
    ranks.run(carried, carrier, _forward, ranks=world)


@carriers
@pytest.mark.parametrize("world", WORLDS)
def test_backward(ranks: RankPool, carrier: str, world: int) -> None:
    ranks.run(carried, carrier, _backward, ranks=world)


@pytest.mark.parametrize("world", (2, 3))
def test_native_reduce_scatter(ranks: RankPool, world: int) -> None:
    ranks.run(_native_reduce_scatter, ranks=world)


def test_one_collective_each_way(ranks: RankPool) -> None:
    assert ranks.run(_count_collectives, ranks=2) == [(1, 1), (1, 1)]


def test_groups_that_are_not_the_world(ranks: RankPool) -> None:
    assert ranks.run(_subgroup, ranks=4) == [[3.0], [3.0], [7.0], [7.0]]


@carriers
def test_opcheck(ranks: RankPool, carrier: str) -> None:
    ranks.run(carried, carrier, _opcheck, ranks=2)


def test_second_gradient_on_one_rank() -> None:
    torch.manual_seed(0)
    args = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 4), (5, 4), (5,))]
    assert torch.autograd.gradcheck(matmul_reduce_scatter, args)
    assert torch.autograd.gradgradcheck(matmul_reduce_scatter, args)


def test_errors() -> None:
    x, weight = torch.zeros(2, 3), torch.zeros(4, 3)
    with pytest.raises(
        ValueError, match=r"matmul_reduce_scatter: scatter_dim must be in \[-2, 1\]"
    ):
        matmul_reduce_scatter(x, weight, scatter_dim=2)
    with pytest.raises(ValueError, match="matmul_reduce_scatter: x must have 3 features"):
        matmul_reduce_scatter(torch.zeros(2, 5), weight)
