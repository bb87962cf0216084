"""all_gather_matmul on 1 to 4 ranks against the unsharded matmul, forward and backward."""

from __future__ import annotations

import pytest
import torch
from parallel_matmul import Case, carried, carriers, cases, count_collectives, make, rounding_bound
from ranks import RankPool
from torch import Tensor

from mcp_kernels import all_gather_matmul
from mcp_kernels.ops import _comm

WORLDS = (1, 2, 3, 4)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _forward(rank: int, world: int) -> None:
    for case in cases():
        for dim in range(len(case.lead) + 1):
            for dtype in DTYPES if dim == 0 else (torch.float64,):
                full = make(case, dtype, world, split="out", dim=dim)
                local = full.local(rank)
                size = full.x.shape[dim]
                y = all_gather_matmul(
                    local.x, local.weight, local.bias, gather_dim=dim, gather_size=size
                )
                exact = full.cut(full.exact, rank, -1)
                assert y.dtype == dtype
                assert y.is_contiguous()
                assert y.shape == exact.shape
                bound = full.cut(rounding_bound(full, dtype, partials=1), rank, -1)
                assert ((y.double() - exact).abs() <= bound).all(), (case, dim, dtype)
                if size % world == 0:
                    same = all_gather_matmul(local.x, local.weight, local.bias, gather_dim=dim)
                    assert torch.equal(same, y)


def _backward(rank: int, world: int, save_gathered: bool) -> None:
    for case in cases():
        for dim in range(len(case.lead) + 1):
            full = make(case, torch.float64, world, split="out", dim=dim, requires_grad=True)
            local = full.local(rank)
            dy = full.dy()
            y = all_gather_matmul(
                local.x,
                local.weight,
                local.bias,
                gather_dim=dim,
                gather_size=full.x.shape[dim],
                save_gathered=save_gathered,
            )
            got = torch.autograd.grad(y, local.leaves(), full.cut(dy, rank, -1))
            dx, dw, *db = full.grads(dy)
            expected = [full.cut(dx, rank, dim), *(full.cut(t, rank, 0) for t in (dw, *db))]
            for actual, wanted in zip(got, expected, strict=True):
                torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


def _several_weights(rank: int, world: int, save_gathered: bool) -> None:
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x_full = draw(2, 4 * world, 6)
    wide = [draw(n * world, 6) for n in (3, 2, 2)]
    bias_full = draw(2 * world)
    dys = [draw(2, 4 * world, w.shape[0]) for w in wide]

    x = x_full.chunk(world, 1)[rank].clone().requires_grad_()
    weights = [w.chunk(world)[rank].clone().requires_grad_() for w in wide]
    bias = bias_full.chunk(world)[rank].clone().requires_grad_()
    ys = all_gather_matmul(
        x, weights, [None, bias, None], gather_dim=1, save_gathered=save_gathered
    )
    leaves = [x, *weights, bias]
    got = torch.autograd.grad(ys, leaves, [dy.chunk(world, -1)[rank] for dy in dys])

    whole = [t.clone().requires_grad_() for t in (x_full, *wide, bias_full)]
    full_ys = [whole[0] @ w.t() for w in whole[1:4]]
    full_ys[1] = full_ys[1] + whole[4]
    for y, full_y in zip(ys, full_ys, strict=True):
        torch.testing.assert_close(y, full_y.chunk(world, -1)[rank], rtol=1e-13, atol=1e-13)
    dx, *rest = torch.autograd.grad(full_ys, whole, dys)
    expected = [dx.chunk(world, 1)[rank], *(t.chunk(world)[rank] for t in rest)]
    for actual, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)
    # An output that no loss uses, and a weight that is frozen.
    weights[0].requires_grad_(False)
    ys = all_gather_matmul(x, weights, gather_dim=1, save_gathered=save_gathered)
    dx, dw = torch.autograd.grad(ys[0].sum() + ys[2].sum(), [x, weights[2]])
    full_ys = [whole[0] @ whole[1].t(), whole[0] @ whole[3].t()]
    full_dx, full_dw = torch.autograd.grad(
        full_ys[0].sum() + full_ys[1].sum(), [whole[0], whole[3]]
    )
    torch.testing.assert_close(dx, full_dx.chunk(world, 1)[rank], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dw, full_dw.chunk(world)[rank], rtol=1e-12, atol=1e-12)


def _count_collectives(rank: int, world: int, save_gathered: bool) -> tuple[int, int]:
    x = torch.randn(4, 6, requires_grad=True)
    weights = [torch.randn(5, 6, requires_grad=True) for _ in range(3)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as forward:
        ys = all_gather_matmul(x, weights, save_gathered=save_gathered)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as backward:
        torch.autograd.backward([y.sum() for y in ys])
    return count_collectives(forward), count_collectives(backward)


def _second_gradient(rank: int, world: int, save_gathered: bool) -> None:
    """The gradient of sum(dx^2) against the unsharded one."""
    generator = torch.Generator().manual_seed(2)
    x_full, w_full = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((2 * world, 3), (2 * world, 3))
    )

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        (dx,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        return (dx**2).sum()

    x = x_full.chunk(world)[rank].clone().requires_grad_()
    w = w_full.chunk(world)[rank].clone().requires_grad_()
    got = torch.autograd.grad(
        loss_of(x, all_gather_matmul(x, w, save_gathered=save_gathered)), [x, w]
    )
    whole = [x_full.clone().requires_grad_(), w_full.clone().requires_grad_()]
    expected = torch.autograd.grad(loss_of(whole[0], whole[0] @ whole[1].t()), whole)
    for actual, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(actual, wanted.chunk(world)[rank], rtol=1e-11, atol=1e-11)


def _op_itself(rank: int, world: int) -> None:
    """The op differentiates by itself too, as the public function does."""
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    b = torch.randn(5, dtype=torch.float64, requires_grad=True)
    name = _comm.group_name(None)
    for save_gathered in (True, False):
        args = (x, [w, w], [b, b], name, 0, None, save_gathered)
        ys, _ = torch.ops.mcp_kernels.all_gather_matmul(*args)
        expected = all_gather_matmul(x, [w, w], [b, b], save_gathered=save_gathered)
        dys = [torch.randn_like(y) for y in expected]
        torch.testing.assert_close(
            torch.autograd.grad(ys, [x, w, b], dys), torch.autograd.grad(expected, [x, w, b], dys)
        )


def _opcheck(rank: int, world: int) -> None:
    full = make(Case((3, 4), 8, 6, True), torch.float64, world, split="out", requires_grad=True)
    local = full.local(rank)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    op = torch.ops.mcp_kernels.all_gather_matmul.default
    weights, name = [local.weight, local.weight], _comm.group_name(None)
    for save_gathered in (True, False):
        for biases in ([], [local.bias, local.bias]):
            args = (local.x, weights, biases, name, 0, 3, save_gathered)
            torch.library.opcheck(op, args, test_utils=tests)


@carriers
@pytest.mark.parametrize("world", WORLDS)
def test_forward(ranks: RankPool, carrier: str, world: int) -> None:
    ranks.run(carried, carrier, _forward, ranks=world)


@carriers
@pytest.mark.parametrize("save_gathered", [True, False])
@pytest.mark.parametrize("world", WORLDS)
def test_backward(ranks: RankPool, carrier: str, world: int, save_gathered: bool) -> None:
    ranks.run(carried, carrier, _backward, save_gathered, ranks=world)


@carriers
@pytest.mark.parametrize("save_gathered", [True, False])
@pytest.mark.parametrize("world", WORLDS)
def test_several_weights(ranks: RankPool, carrier: str, world: int, save_gathered: bool) -> None:
    ranks.run(carried, carrier, _several_weights, save_gathered, ranks=world)


@pytest.mark.parametrize(("save_gathered", "expected"), [(True, (1, 1)), (False, (1, 2))])
def test_collectives_are_shared_by_weights(
    ranks: RankPool, save_gathered: bool, expected: tuple[int, int]
) -> None:
    assert ranks.run(_count_collectives, save_gathered, ranks=2) == [expected] * 2


@carriers
@pytest.mark.parametrize("save_gathered", [True, False])
@pytest.mark.parametrize("world", (1, 2))
def test_second_gradient(ranks: RankPool, carrier: str, world: int, save_gathered: bool) -> None:
    ranks.run(carried, carrier, _second_gradient, save_gathered, ranks=world)


@carriers
def test_op_differentiates_by_itself(ranks: RankPool, carrier: str) -> None:
    ranks.run(carried, carrier, _op_itself, ranks=2)


@carriers
def test_opcheck(ranks: RankPool, carrier: str) -> None:
    ranks.run(carried, carrier, _opcheck, ranks=2)


def test_errors() -> None:
    x, weight = torch.zeros(2, 3), torch.zeros(4, 3)
    with pytest.raises(ValueError, match="all_gather_matmul: weight must hold at least one tensor"):
        all_gather_matmul(x, [])
    with pytest.raises(ValueError, match="all_gather_matmul: bias must be one for each of 2"):
        all_gather_matmul(x, [weight, weight], [None])
    with pytest.raises(ValueError, match="all_gather_matmul: gather_size must cut into"):
        all_gather_matmul(x, weight, gather_size=5)
    with pytest.raises(ValueError, match="all_gather_matmul: x must have 3 features"):
        all_gather_matmul(torch.zeros(2, 5), weight)
