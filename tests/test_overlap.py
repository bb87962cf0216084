"""The tensor-parallel matmuls in pieces under their communication: who takes it, and that it is so.

That the results are right on groups between hosts is in the tests of the ops themselves (carrier
"hosts"); here is what those cannot see.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_matmul import Case, carried, count_collectives, make, needs_shm
from ranks import RankPool

from mcp_kernels import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    reference_only,
    which_backend,
)
from mcp_kernels.ops import _comm, _overlap_group
from mcp_kernels.ops._overlap_cut import MOST_PIECES, cut_gather, cut_product, steps_of

CASE = Case((2, 12), 24, 16, has_bias=True)


def _calls(rank: int, world: int) -> list[tuple[str, int, Any]]:
    """(name, pieces, call) of each op, large enough for pieces on the carrier "hosts"."""
    summed = make(CASE, torch.float64, world, split="in").local(rank)
    given = (summed.x, summed.weight, summed.bias)
    rows = make(CASE, torch.float64, world, split="out", dim=1).local(rank)
    weights, biases = [rows.weight], [rows.bias]
    positions = CASE.lead[1] // world  # two make a piece there
    return [
        ("sum", MOST_PIECES, lambda: matmul_all_reduce(*given)),
        ("scatter", MOST_PIECES, lambda: matmul_reduce_scatter(*given, scatter_dim=1)),
        (
            "gather",
            positions // 2,
            lambda: all_gather_matmul(rows.x, weights, biases, gather_dim=1)[0],
        ),
    ]


def _in_pieces(rank: int, world: int) -> None:
    for name, pieces, call in _calls(rank, world):
        with reference_only():
            whole = call()
        torch.testing.assert_close(call(), whole, rtol=1e-13, atol=1e-13)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            call()
        assert count_collectives(profile) == pieces, name
        found: Any = profile.events()
        events = sorted(found, key=lambda event: event.time_range.start)
        order = [e.name for e in events if e.name.startswith("c10d::") or e.name in _PRODUCTS]
        first_product = next(i for i, event in enumerate(order) if event in _PRODUCTS)
        last_product = max(i for i, event in enumerate(order) if event in _PRODUCTS)
        if name == "gather":  # all is sent before anything is multiplied
            assert first_product == pieces
        else:  # all but the last piece is sent before the last product
            assert last_product == len(order) - 2, order


_PRODUCTS = ("aten::mm", "aten::addmm")


@pytest.mark.parametrize("world", [2, 4])
def test_pieces_are_sent_while_others_are_computed(ranks: RankPool, world: int) -> None:
    ranks.run(carried, "hosts", _in_pieces, ranks=world)


def _as_the_reference(rank: int, world: int) -> None:
    x, weight = torch.zeros(24, 8), torch.zeros(16, 8)
    assert which_backend(matmul_all_reduce, x, weight).chosen == "overlap"
    for _, _, call in _calls(rank, world):
        with reference_only():
            whole = call()
        torch.testing.assert_close(call(), whole, rtol=1e-13, atol=1e-13)


@needs_shm
def test_backend_shm_with_a_host_for_each_rank(ranks: RankPool) -> None:
    ranks.run(carried, "shm_hosts", _as_the_reference, ranks=3)


def _never_waits(rank: int, world: int, index: int, products: int) -> None:
    name, _, call = _calls(rank, world)[index]
    _overlap_group.why_not(torch.zeros(1), _comm.group_name(None))  # asked, once for a group
    _run_ahead(rank, name, products, call)


def _gathers_again(rank: int, world: int) -> None:
    """Backward without the gathered x: dx = dy @ weight, while x comes."""
    part = make(CASE, torch.float64, world, split="out", dim=1, requires_grad=True).local(rank)
    y = all_gather_matmul(part.x, part.weight, gather_dim=1, save_gathered=False)
    _run_ahead(rank, "backward", 1, y.sum().backward)


def _run_ahead(rank: int, name: str, products: int, call: Any) -> None:
    """Rank 1 stays away until rank 0 has computed all that needs nothing of it."""
    store = dist.distributed_c10d._get_default_store()
    key = f"computed {name} {dist.distributed_c10d._world.group_count}"
    kept = {product: getattr(torch, product) for product in ("mm", "addmm")}
    left = [products]

    def count(product: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = kept[product](*args, **kwargs)
            left[0] -= 1
            if left[0] == 0:
                store.set(key, "done")
            return result

        return run

    if rank == 1:
        store.wait([key], timedelta(seconds=10))
    try:
        for product in kept if rank == 0 else ():
            setattr(torch, product, count(product))
        call()
    finally:
        for product, function in kept.items():
            setattr(torch, product, function)
    assert rank == 1 or left[0] <= 0


# Of the sum: a product a piece. Of the scatter: each rank's rows of a piece. Of the gather: the own
# rows of each sample.
@pytest.mark.parametrize("carrier", ["hosts", pytest.param("shm_hosts", marks=needs_shm)])
@pytest.mark.parametrize("index, products", [(0, 4), (1, 8), (2, 2)])
def test_nobody_waits_before_its_products_are_done(
    ranks: RankPool, carrier: str, index: int, products: int
) -> None:
    ranks.run(carried, carrier, _never_waits, index, products, ranks=2)


@pytest.mark.parametrize("carrier", ["gloo", pytest.param("shm", marks=needs_shm)])
def test_x_is_gathered_again_while_dx_is_computed(ranks: RankPool, carrier: str) -> None:
    ranks.run(carried, carrier, _gathers_again, ranks=2)


def _equal_bits(rank: int, world: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        local = make(CASE, dtype, world, split="in").local(rank)
        y = matmul_all_reduce(local.x, local.weight, local.bias)
        everyone = [torch.empty_like(y) for _ in range(world)]
        dist.all_gather(everyone, y)
        assert all(torch.equal(other, y) for other in everyone)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_rank_has_the_same_bits(ranks: RankPool, world: int) -> None:
    ranks.run(carried, "hosts", _equal_bits, ranks=world)


def _choice(rank: int, world: int) -> tuple[str, str]:
    (_, _, call), *_ = _calls(rank, world)
    local = make(CASE, torch.float64, world, split="in").local(rank)

    def ask() -> Any:
        return which_backend(matmul_all_reduce, local.x, local.weight, local.bias)

    if rank == 0:  # a look of one rank must not wait for the others
        assert ask().refused["overlap"] == _overlap_group.NOT_ASKED
    call()
    choice = ask()
    small = which_backend(matmul_all_reduce, local.x[:1, :1], local.weight[:3])
    assert small.refused["overlap"].startswith("needs at least two pieces")
    return choice.chosen, choice.refused.get("overlap", "")


def _choice_on_pairs(rank: int, world: int) -> tuple[str, str]:
    _overlap_group.host_number = lambda: rank // 2
    return _choice(rank, world)


def _choice_on_one_host(rank: int, world: int) -> tuple[str, str]:
    _overlap_group.host_number = lambda: 7
    return _choice(rank, world)


def test_a_group_on_one_host_keeps_the_reference(ranks: RankPool) -> None:
    one = ranks.run(carried, "hosts", _choice_on_one_host, ranks=3)
    assert one == [("reference", _overlap_group.ONE_HOST)] * 3
    assert ranks.run(carried, "hosts", _choice_on_pairs, ranks=3) == [("overlap", "")] * 3


def test_host_number_is_of_the_host(ranks: RankPool) -> None:
    assert len(set(ranks.run(_host))) == 1


def _host(rank: int, world: int) -> int:
    return _overlap_group.host_number()


@needs_shm
def test_other_carriers_say_why_not(ranks: RankPool) -> None:
    ranks.run(carried, "shm", _refused_by_shm, ranks=2)
    assert _overlap_group.why_not(torch.zeros(1), "") == "one rank has nothing to send"


def _refused_by_shm(rank: int, world: int) -> None:
    x, weight = torch.zeros(2048, 1), torch.zeros(1024, 1)
    choice = which_backend(matmul_all_reduce, x, weight, group=dist.group.WORLD)
    assert choice.chosen == "shm"
    assert choice.refused["overlap"] == _overlap_group.SHARED


def test_cuts_cover_once_and_keep_their_sizes() -> None:
    mib = 1 << 20
    for size, count in [(7, 3), (2048, 4), (5, 5), (1, 1)]:
        steps = steps_of(size, count)
        assert [first for first, _ in steps] == [sum(n for _, n in steps[:i]) for i in range(count)]
        assert sum(n for _, n in steps) == size
        assert max(n for _, n in steps) - min(n for _, n in steps) <= 1
    assert cut_product(511, 1023, 64 * mib) is None  # no two pieces of 512 either way
    assert cut_product(4096, 4096, 2 * mib - 1) is None
    for rows, columns, num_bytes, by_rows, count in [
        (1024, 512, 64 * mib, True, 2),
        (512, 4096, 8 * mib, False, 4),
        (8192, 8192, 3 * mib, True, 3),
        (2048, 4096, 64 * mib, True, 4),
    ]:
        cut = cut_product(rows, columns, num_bytes)
        assert cut is not None
        assert (cut.by_rows, len(cut.steps)) == (by_rows, count)
    assert cut_gather((2, 512, 2, 1024), 1, 4) == steps_of(512, 2)  # two pieces of 512 rows each
    assert cut_gather((2, 511, 1, 1024), 1, 4) is None
    assert cut_gather((1, 4096, 255), 1, 1) is None
