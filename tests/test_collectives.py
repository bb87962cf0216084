"""Collectives on 1 to 4 ranks: forward against one process, backward against autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_matmul import carried, carriers
from ranks import RankPool

import mcp_kernels
from mcp_kernels import all_gather, all_reduce, copy_to_group, reduce_scatter
from mcp_kernels.ops import _comm
from mcp_kernels.testing import sum_error_bound

WORLDS = (1, 2, 3, 4)
# (shape, dim): even for some W and uneven for others, a dimension shorter than W, empty, 1-D.
CASES = [((12, 5), 0), ((2, 12, 3), 1), ((1, 24, 3), 1), ((7, 3), 0), ((2, 3, 5), -1), ((2, 3), 0),
         ((3, 0, 4), 0), ((0, 3), 0), ((13,), 0)]  # fmt: skip
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)


def _values(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (values * 8).round().to(dtype) if dtype == torch.int64 else values.to(dtype)


def _strided(x: torch.Tensor) -> torch.Tensor:
    """The same values behind an inner stride of 2 and a storage offset."""
    padded = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1] + 1)
    padded[..., 1::2] = x
    return padded[..., 1::2]


def _part(x: torch.Tensor, world: int, rank: int, dim: int) -> torch.Tensor:
    return x.split(_comm.split_sizes(x.shape[dim], world), dim)[rank]


def _forward(rank: int, world: int) -> None:
    for seed, (shape, dim) in enumerate(CASES):
        for dtype in DTYPES:
            each = [_values(shape, 10 * seed + r, dtype) for r in range(world)]
            wide = torch.int64 if dtype == torch.int64 else torch.float64
            exact = torch.stack([x.to(wide) for x in each]).sum(0)
            x = _strided(each[rank])
            before = x.clone()
            magnitude = torch.stack([x.to(wide).abs() for x in each]).sum(0)
            # Integers are exact; a float sum of W terms is rounded once, W > 2 halves included.
            bound = torch.zeros_like(magnitude)
            if dtype.is_floating_point:
                bound = sum_error_bound(exact, magnitude, world, dtype)

            total = all_reduce(x)
            assert total.dtype == dtype
            assert total.is_contiguous()
            assert ((total.to(wide) - exact).abs() <= bound).all(), (shape, dtype)
            gathered = [torch.empty_like(total) for _ in range(world)]
            dist.all_gather(gathered, total)
            assert all(torch.equal(other, total) for other in gathered)

            mine = reduce_scatter(x, scatter_dim=dim)
            assert mine.dtype == dtype
            assert mine.is_contiguous()
            expected = _part(exact, world, rank, dim)
            assert mine.shape == expected.shape
            limit = _part(bound, world, rank, dim)
            assert ((mine.to(wide) - expected).abs() <= limit).all(), (shape, dtype)

            whole = _values(shape, 99, dtype)
            part = _strided(_part(whole, world, rank, dim))
            joined = all_gather(part, gather_dim=dim, gather_size=shape[dim])
            assert joined.is_contiguous()
            assert torch.equal(joined, whole)
            if shape[dim] % world == 0:
                assert torch.equal(all_gather(part, gather_dim=dim), whole)
            assert torch.equal(x, before)


def _backward(rank: int, world: int) -> None:
    for shape, dim in CASES:
        weight = _values(shape, 5)  # the loss is sum(weight * joined value), made of the parts
        # reduce_scatter: every rank's x enters one sum, and each rank weighs its part of it.
        x = _values(shape, rank).requires_grad_()
        mine = reduce_scatter(x, scatter_dim=dim)
        (grad,) = torch.autograd.grad((mine * _part(weight, world, rank, dim)).sum(), x)
        assert torch.equal(grad, weight)
        # all_reduce: the sum is replicated, and so is the loss made of it.
        x = _values(shape, rank).requires_grad_()
        (grad,) = torch.autograd.grad((all_reduce(x) * weight).sum(), x)
        assert torch.equal(grad, weight)
        # all_gather: rank r weighs the joined value by (r + 1) * weight.
        part = _part(_values(shape, 7), world, rank, dim).clone().requires_grad_()
        joined = all_gather(part, gather_dim=dim, gather_size=shape[dim])
        (joined * weight * (rank + 1)).sum().backward()
        ranks_sum = world * (world + 1) / 2
        torch.testing.assert_close(
            part.grad, _part(weight, world, rank, dim) * ranks_sum, rtol=1e-14, atol=1e-14
        )
        # copy_to_group: the same use of a value that every rank holds in full.
        x = _values(shape, 7).requires_grad_()
        (copy_to_group(x) * weight * (rank + 1)).sum().backward()
        torch.testing.assert_close(x.grad, weight * ranks_sum, rtol=1e-14, atol=1e-14)


def _double_backward(rank: int, world: int) -> None:
    x = _values((4, 3), rank).requires_grad_()
    (first,) = torch.autograd.grad((reduce_scatter(x) ** 3).sum(), x, create_graph=True)
    # first = 3 s^2 of the whole sum s, used by every rank: its gradient is W * 6 s a rank.
    (second,) = torch.autograd.grad(first.sum(), x)
    total = sum(_values((4, 3), r) for r in range(world))
    torch.testing.assert_close(second, 6 * world * total, rtol=1e-12, atol=1e-12)


def _subgroup(rank: int, world: int) -> float | str:
    pair: Any = dist.new_group([0, 2])
    x = torch.full((2,), float(rank))
    if rank in (0, 2):
        return float(all_reduce(x, group=pair)[0])
    try:
        all_reduce(x, group=pair)
    except ValueError as error:
        return str(error)
    return "no error"


def _opcheck(rank: int, world: int) -> None:
    name = _comm.group_name(None)
    x = _values((5, 4, 3), rank).requires_grad_()
    ops = torch.ops.mcp_kernels
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.all_reduce.default, (x, name), test_utils=tests)
    for dim in range(3):
        torch.library.opcheck(ops.reduce_scatter.default, (x, name, dim), test_utils=tests)
        torch.library.opcheck(ops.all_gather.default, (x, name, dim, None), test_utils=tests)


def _errors(rank: int, world: int) -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(
        ValueError, match=r"reduce_scatter: scatter_dim must be in \[-2, 1\], got 2"
    ):
        reduce_scatter(x, scatter_dim=2)
    with pytest.raises(ValueError, match="all_gather: gather_dim must be in"):
        all_gather(x, gather_dim=-3)
    with pytest.raises(ValueError, match="all_gather: gather_size must cut into this rank's part"):
        all_gather(x, gather_size=7)


@carriers
@pytest.mark.parametrize("world", WORLDS)
def test_forward(ranks: RankPool, carrier: str, world: int) -> None:
    ranks.run(carried, carrier, _forward, ranks=world)


@carriers
@pytest.mark.parametrize("world", WORLDS)
def test_backward(ranks: RankPool, carrier: str, world: int) -> None:
    ranks.run(carried, carrier, _backward, ranks=world)


def test_double_backward(ranks: RankPool) -> None:
    ranks.run(_double_backward, ranks=2)


def test_group_that_is_not_the_world(ranks: RankPool) -> None:
    first, outside, second = ranks.run(_subgroup, ranks=3)
    assert first == second == 2.0
    assert "group must be a ProcessGroup this rank belongs to" in str(outside)


def test_opcheck(ranks: RankPool) -> None:
    ranks.run(_opcheck, ranks=2)


def test_errors(ranks: RankPool) -> None:
    ranks.run(_errors, ranks=2)


def test_without_torch_distributed() -> None:
    assert not dist.is_initialized()
    x = torch.randn(3, 4, requires_grad=True)
    for y in (all_reduce(x), reduce_scatter(x, scatter_dim=1), all_gather(x), copy_to_group(x)):
        assert torch.equal(y, x)
        (grad,) = torch.autograd.grad((y * 3).sum(), x)
        assert torch.equal(grad, torch.full_like(x, 3.0))
    assert all_reduce(x).data_ptr() != x.data_ptr()
    with mcp_kernels.reference_only():
        assert torch.equal(all_reduce(x.detach()), x)


def test_split_sizes_are_those_of_chunk() -> None:
    for size in range(1, 20):
        for parts in range(1, 8):
            chunks = [piece.numel() for piece in torch.zeros(size).chunk(parts)]
            assert _comm.split_sizes(size, parts) == chunks + [0] * (parts - len(chunks))


def test_the_bound_holds_below_the_normal_numbers() -> None:
    """Half the least number at most, reached at half way between two."""
    exact = torch.arange(1, 200, dtype=torch.float64) * 2.0**-26
    error = (exact.half().double() - exact).abs()
    bound = sum_error_bound(exact, exact, 1, torch.float16)
    assert (error <= bound).all()
    assert error.max() == 2.0**-25
    assert bound.max() < 2.0**-25 * 1.0001
