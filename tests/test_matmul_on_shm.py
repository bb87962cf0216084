"""The fused path of the tensor-parallel matmuls: who takes it, what it refuses, how it fails."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_matmul import Case, carried, make, needs_shm, rounding_bound
from ranks import RankError, RankPool

from mcp_kernels import (
    all_gather_matmul,
    copy_to_group,
    matmul_all_reduce,
    matmul_reduce_scatter,
    which_backend,
)
from mcp_kernels.ops import _comm, _fused
from mcp_kernels.ops._linear import linear

pytestmark = needs_shm
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _equal_bits(rank: int, world: int) -> None:
    for dtype in DTYPES:
        full = make(Case((3, 11), 40, 37, has_bias=True), dtype, world, split="in")
        local = full.local(rank)
        y = matmul_all_reduce(local.x, local.weight, local.bias)
        everyone = [torch.empty_like(y) for _ in range(world)]
        dist.all_gather(everyone, y)
        assert all(torch.equal(other, y) for other in everyone)
        # In rank order, widened, rounded once: what one process would add up; a bias of rank 0.
        parts = [torch.empty_like(y) for _ in range(world)]
        mine = linear(local.x, local.weight, local.bias if rank == 0 else None)
        dist.all_gather(parts, mine)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        total = parts[0].to(wide)
        for part in parts[1:]:
            total = total + part.to(wide)
        assert torch.equal(y, total.to(dtype))


@pytest.mark.parametrize("carrier", ["shm", "small_shm"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_rank_has_the_bits_of_a_sum_in_rank_order(
    ranks: RankPool, carrier: str, world: int
) -> None:
    ranks.run(carried, carrier, _equal_bits, ranks=world)


def _replicated_input(rank: int, world: int) -> None:
    """gather_dim None: as copy_to_group before a matmul with this rank's rows of the weight."""
    for case in (Case((2, 12), 13, 36, True, is_strided=True), Case((0, 3), 8, 5, True)):
        full = make(case, torch.float64, world, split="out", requires_grad=True)
        local = full.local(rank)
        x = full.x.clone().requires_grad_()
        dy = full.cut(full.dy(), rank, -1)
        leaves = [x, local.weight, local.bias]
        y = all_gather_matmul(x, local.weight, local.bias, gather_dim=None)
        same = torch.nn.functional.linear(copy_to_group(x), local.weight, local.bias)
        torch.testing.assert_close(y, same, rtol=1e-13, atol=1e-13)
        got, expected = (torch.autograd.grad(t, leaves, dy) for t in (y, same))
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        dx = full.grads(full.dy())[0]
        torch.testing.assert_close(got[0], dx, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("carrier", ["gloo", "shm", "small_shm"])
@pytest.mark.parametrize("world", [1, 3])
def test_replicated_input(ranks: RankPool, carrier: str, world: int) -> None:
    ranks.run(carried, carrier, _replicated_input, ranks=world)


def _subgroups(rank: int, world: int) -> list[float]:
    """Two groups of two, and all four, by turns on one host."""
    import mcp_kernels.shm  # noqa: F401 (registers the backend)

    pairs = [dist.new_group([0, 2], backend="shm"), dist.new_group([1, 3], backend="shm")]
    mine: Any = pairs[rank % 2]
    x, weight = torch.full((1, 1), 10.0**rank), torch.ones(1, 1)
    # More calls than slots.
    return [matmul_all_reduce(x, weight, group=mine).item() for _ in range(6)]


def test_groups_that_are_not_the_world(ranks: RankPool) -> None:
    assert ranks.run(_subgroups) == [[101.0] * 6, [1010.0] * 6] * 2


def _choices(rank: int, world: int) -> None:
    x, weight = torch.zeros(2, 3), torch.zeros(4, 3)
    ops: list[tuple[Any, Any]] = [
        (matmul_all_reduce, weight),
        (matmul_reduce_scatter, weight),
        (all_gather_matmul, [weight]),
    ]
    for op, given in ops:
        args = {"group": dist.group.WORLD}
        assert which_backend(op, x, given, **args).chosen == "shm"
    name = _comm.group_name(None)
    refusal = _fused.why_not(torch.zeros(2, dtype=torch.int64), name, 16)
    assert refusal == "needs float32, float64, bfloat16 or float16, got torch.int64"


def _choices_on_gloo(rank: int, world: int) -> None:
    choice = which_backend(matmul_all_reduce, torch.zeros(2, 3), torch.zeros(4, 3))
    assert choice.chosen == "reference"
    assert choice.refused["shm"] == "the group's backend is gloo, not shm"


def test_which_backend(ranks: RankPool) -> None:
    ranks.run(carried, "shm", _choices, ranks=2)
    ranks.run(carried, "gloo", _choices_on_gloo, ranks=2)


def _no_room(rank: int, world: int) -> None:
    """One rank cannot reserve its segment: all take the reference, and the reason is told."""
    from mcp_kernels.shm import workspace

    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    shm: Any = workspace._shm
    original = shm.Workspace
    try:
        if rank == 1:
            shm.Workspace = refuse
        full = make(Case((3, 3), 8, 5, True), torch.float64, world, split="in")
        local = full.local(rank)
        y = matmul_reduce_scatter(local.x, local.weight, local.bias)
    finally:
        shm.Workspace = original
    bound = full.cut(rounding_bound(full, torch.float64, partials=world), rank, 0)
    assert ((y - full.cut(full.exact, rank, 0)).abs() <= bound).all()
    again = matmul_reduce_scatter(local.x, local.weight, local.bias)  # decided once
    assert torch.equal(y, again)
    choice = which_backend(matmul_reduce_scatter, local.x, local.weight, local.bias)
    assert choice.chosen == "reference"
    assert "rank 1: no room for slots" in choice.refused["shm"]


def test_a_rank_without_room_decides_for_all(ranks: RankPool) -> None:
    ranks.run(carried, "shm", _no_room, ranks=3)


def _other_shapes(rank: int, world: int) -> None:
    weight = torch.zeros(4, 3)
    matmul_reduce_scatter(torch.zeros(2, 3), weight)
    started = time.monotonic()
    with pytest.raises(
        RuntimeError, match=r"matmul_reduce_scatter \(float32 \[[23], 4\]\) on rank"
    ):
        matmul_reduce_scatter(torch.zeros(2 + rank, 3), weight)
    # Long before the group's timeout. Two seconds are promised to ranks with a core each.
    assert time.monotonic() - started < 60.0


def _other_calls(rank: int, world: int) -> None:
    x, weight = torch.zeros(2, 3), torch.zeros(4, 3)
    matmul_reduce_scatter(x, weight)

    def call() -> object:
        if rank == 0:
            return dist.all_reduce(torch.zeros(8))
        return matmul_reduce_scatter(x, weight)

    with pytest.raises(RuntimeError, match="ranks must make the same calls in the same order"):
        call()


@pytest.mark.parametrize("body", [_other_shapes, _other_calls])
def test_ranks_that_disagree_all_hear_of_it(ranks: RankPool, body: Any) -> None:
    ranks.run(carried, "shm", body, ranks=2)


def _interrupted(rank: int, world: int) -> None:
    matmul_reduce_scatter(torch.zeros(2, 3), torch.zeros(4, 3))
    weight = torch.zeros(4, 3)
    if rank == 0:
        mm = torch.mm
        try:
            torch.mm = _interrupt  # pyright: ignore[reportAttributeAccessIssue]
            with pytest.raises(KeyboardInterrupt):
                matmul_reduce_scatter(torch.zeros(2, 3), weight)
        finally:
            torch.mm = mm
    else:
        with pytest.raises(RuntimeError, match="matmul_reduce_scatter was interrupted on rank 0"):
            matmul_reduce_scatter(torch.zeros(2, 3), weight)


def _interrupt(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_rank_tells_its_peers(ranks: RankPool) -> None:
    ranks.run(carried, "shm", _interrupted, ranks=2)


def _compiled(rank: int, world: int) -> None:
    full = make(Case((3, 4), 12, 6, True), torch.float64, world, split="in", requires_grad=True)
    local = full.local(rank)
    sharded = make(Case((3, 4), 12, 6, True), torch.float64, world, split="out", dim=1)
    part = sharded.local(rank)
    x = part.x.requires_grad_()

    def layer(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        one = matmul_all_reduce(a, local.weight, local.bias).square().sum()
        two = matmul_reduce_scatter(a, local.weight, scatter_dim=1).square().sum()
        three = all_gather_matmul(b, part.weight, part.bias, gather_dim=1).square().sum()
        return one + two + three

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(local.x, x), [local.x, x])
    expected = torch.autograd.grad(layer(local.x, x), [local.x, x])
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


def test_compile(ranks: RankPool) -> None:
    ranks.run(carried, "shm", _compiled, ranks=2)


def test_blocks_cover_a_product_once() -> None:
    for rows, columns, itemsize, slot in [
        (512, 2048, 4, 2 << 20),
        (1, 7, 8, 64),
        (5000, 100, 2, 4096),
        (7, 1000, 4, 4096),
        (3, 70_000, 4, 128 << 10),
    ]:
        covered = torch.zeros(rows, columns, dtype=torch.int8)
        for row, height, column, width in _fused.blocks_of(rows, columns, itemsize, slot):
            assert 0 < height * width * itemsize <= slot
            covered[row : row + height, column : column + width] += 1
        assert (covered == 1).all()


def _fail(rank: int, world: int) -> None:
    matmul_all_reduce(torch.zeros(2, 3), torch.zeros(4, 3))
    if rank == 0:
        raise ValueError("planted")
    matmul_all_reduce(torch.zeros(2, 3), torch.zeros(4, 3))


def test_a_rank_that_ends_is_named(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="planted"):
        ranks.run(carried, "shm", _fail, ranks=2)
