"""matmul_all_reduce on 1 to 4 ranks against the unsharded matmul, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel_matmul import Case, carried, carriers, cases, make, rounding_bound
from ranks import RankPool

from mcp_kernels import matmul_all_reduce
from mcp_kernels.ops import _comm

WORLDS = (1, 2, 3, 4)


def _forward(rank: int, world: int) -> None:
    for case in cases():
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            full = make(case, dtype, world, split="in")
            local = full.local(rank)
            y = matmul_all_reduce(local.x, local.weight, local.bias)
            assert y.dtype == dtype
            assert y.is_contiguous()
            assert y.shape == full.exact.shape
            bound = rounding_bound(full, dtype, partials=world)
            assert ((y.double() - full.exact).abs() <= bound).all(), (case, dtype)


def _backward(rank: int, world: int) -> None:
    for case in cases():
        full = make(case, torch.float64, world, split="in", requires_grad=True)
        local = full.local(rank)
        dy = full.dy()
        y = matmul_all_reduce(local.x, local.weight, local.bias)
        got = torch.autograd.grad(y, local.leaves(), dy)
        dx, dw, *db = full.grads(dy)
        expected = [full.cut(dx, rank, -1), full.cut(dw, rank, 1), *db]
        for actual, wanted in zip(got, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


def _only_needed_gradients(rank: int, world: int) -> None:
    x, weight = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True)
    y = matmul_all_reduce(x, weight)
    node: Any = y.grad_fn
    saved = [t for t in node.saved_tensors if t is not None]
    assert len(saved) == 1  # the weight itself is not kept: x needs no gradient
    assert saved[0].data_ptr() == x.data_ptr()


def _opcheck(rank: int, world: int) -> None:
    full = make(Case((2, 3), 8, 5, True), torch.float64, world, split="in", requires_grad=True)
    local = full.local(rank)
    args = (local.x, local.weight, local.bias, _comm.group_name(None))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.mcp_kernels.matmul_all_reduce.default, args, test_utils=tests)


@carriers
@pytest.mark.parametrize("world", WORLDS)
def test_forward(ranks: RankPool, carrier: str, world: int) -> None:
    ranks.run(carried, carrier, _forward, ranks=world)


@carriers
@pytest.mark.parametrize("world", WORLDS)
def test_backward(ranks: RankPool, carrier: str, world: int) -> None:
    ranks.run(carried, carrier, _backward, ranks=world)


def test_saves_only_what_backward_needs(ranks: RankPool) -> None:
    ranks.run(_only_needed_gradients, ranks=2)


@carriers
def test_opcheck(ranks: RankPool, carrier: str) -> None:
    ranks.run(carried, carrier, _opcheck, ranks=2)


def test_second_gradient_on_one_rank() -> None:
    torch.manual_seed(0)
    args = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 4), (5, 4), (5,))]
    assert torch.autograd.gradcheck(matmul_all_reduce, args)
    assert torch.autograd.gradgradcheck(matmul_all_reduce, args)


def test_errors() -> None:
    x, weight = torch.zeros(2, 3), torch.zeros(4, 3)
    with pytest.raises(ValueError, match="matmul_all_reduce: x must have 3 features"):
        matmul_all_reduce(torch.zeros(2, 5), weight)
    with pytest.raises(ValueError, match=r"matmul_all_reduce: bias must be \[4\], got \[3\]"):
        matmul_all_reduce(x, weight, torch.zeros(3))
    with pytest.raises(ValueError, match="matmul_all_reduce: x must be"):
        matmul_all_reduce(x, torch.zeros(3))
    with pytest.raises(TypeError, match="matmul_all_reduce: x, weight and bias must have one dty"):
        matmul_all_reduce(x, weight.double())
