"""The fused matmul and all-reduce in Triton's interpreter: processes as ranks, real flags.

Each rank is a process that runs the kernel; buffers are shared memory. Results are held against
float64 on the same rounded inputs, and their bits against the other ranks'.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_matmul import Case, make, rounding_bound
from ranks import RankPool
from torch import Tensor

pytest.importorskip("triton")

import triton.language as tl
from triton_peers import SECOND_NS, assert_seen, make_peers, new_buffers, planted

from mcp_kernels.symmetric.layout import Layout, read_error
from mcp_kernels.triton import matmul_reduce, matmul_reduce_launch, symmetric_flags
from mcp_kernels.triton.matmul_reduce_launch import (
    ONE_SHOT,
    TWO_SHOT,
    Product,
    matmul_all_reduce,
)
from mcp_kernels.triton.symmetric_launch import Tile

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")

TILE = Tile(16, 16, 16, 4, 2)
# Room for 8 tiles of 16 x 16 float32: larger products go in several pieces.
SLOT_BYTES = 8 * 16 * 16 * 4
NUM_ROWS = 17

# One row and fewer tiles than owners, no rows, strides and tiles that do not fit, several pieces.
CASES = (
    Case((1,), 33, 17, True),
    Case((0,), 8, 5, True),
    Case((3, 7), 19, 45, False, is_strided=True),
    Case((34,), 12, 37, True),
)


def flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def call(full: Any, rank: int, peers: Any, form: int, dtype: torch.dtype) -> Tensor:
    local = full.local(rank)
    y = torch.full((flat(local.x).shape[0], local.weight.shape[0]), float("nan"), dtype=dtype)
    product = Product(flat(local.x), local.weight, local.bias)
    matmul_all_reduce(product, y, peers, form=form, tile=TILE)
    assert int(peers.error) == 0
    return y


def all_cases(
    rank: int, world: int, folder: str, form: int, dtypes: list[torch.dtype], polls: bool
) -> list[Tensor]:
    """Every case in turn, on one channel: slots and flags are reused, sizes change."""
    had_poll = symmetric_flags.HAS_POLL
    symmetric_flags.HAS_POLL = tl.constexpr(polls)
    peers, _kept = make_peers(folder, rank, Layout(world, NUM_ROWS, SLOT_BYTES))
    results = []
    try:
        for case in CASES:
            for dtype in dtypes:
                full = make(case, dtype, world, split="in")
                y = call(full, rank, peers, form, dtype)
                bound = flat(rounding_bound(full, dtype, partials=world))
                assert ((y.double() - flat(full.exact)).abs() <= bound).all(), (case, dtype)
                results.append(y.view(torch.uint8) if y.numel() else y)
    finally:
        symmetric_flags.HAS_POLL = had_poll
    return results


@pytest.mark.parametrize(
    "world, form, dtypes, polls",
    [
        pytest.param(1, TWO_SHOT, [torch.float32], True, marks=pytest.mark.slow),
        (2, ONE_SHOT, [torch.bfloat16], True),
        (2, TWO_SHOT, [torch.float32], False),
        pytest.param(3, ONE_SHOT, [torch.float16], False, marks=pytest.mark.slow),
        pytest.param(3, TWO_SHOT, [torch.bfloat16], True, marks=pytest.mark.slow),
        (4, TWO_SHOT, [torch.float32], True),
    ],
)
def test_forward(
    ranks: RankPool, tmp_path: Path, world: int, form: int, dtypes: list[Any], polls: bool
) -> None:
    folder = new_buffers(tmp_path / "buffers", Layout(world, NUM_ROWS, SLOT_BYTES))
    results = ranks.run(all_cases, folder, form, dtypes, polls, ranks=world)
    for others in results[1:]:
        for mine, theirs in zip(results[0], others, strict=True):
            assert torch.equal(mine, theirs), "ranks hold different bits"


BUGS = {
    "rotation of the read": (
        TWO_SHOT,
        "held = _slot(buffers, rank if MULTICAST else owner, slot_at, TYPE)",
        "held = _slot(buffers, peer_at(rank, turn + 1, WORLD), slot_at, TYPE)",
    ),
    "flag before the store": (
        ONE_SHOT,
        "                put_tile(mine, tile, acc, PRECISION, BLOCK_M, BLOCK_N)\n",
        """\
                at = flag_row(epoch, 1 + local, num_rows, WORLD) + rank
                publish(buffers, at, epoch, WORLD, LANES)
                late()
                put_tile(mine, tile, acc, PRECISION, BLOCK_M, BLOCK_N)
""",
    ),
    "no wait for the products": (
        ONE_SHOT,
        "alive = wait_all(own, error, at, epoch, WORLD, LANES, TIMEOUT_NS)\n            n, first",
        "pass\n            n, first",
    ),
    "no wait for the sums": (
        TWO_SHOT,
        "alive = wait_one(own, error, at, owner, epoch, TIMEOUT_NS)",
        "pass",
    ),
}


def with_bug(rank: int, world: int, folder: str, bug: str | None, delay_s: float) -> None:
    def late() -> None:
        """Rank 1 falls behind, so that who does not wait for it is early."""
        if rank == 1:
            time.sleep(delay_s)

    form, right, wrong = BUGS[bug] if bug else (TWO_SHOT, "ONE_SHOT", "ONE_SHOT")
    module = planted(matmul_reduce, right, wrong, folder)
    module.late = late  # pyright: ignore[reportAttributeAccessIssue]
    kernel = matmul_reduce_launch._matmul_reduce_kernel
    matmul_reduce_launch._matmul_reduce_kernel = module._matmul_reduce_kernel
    peers, _kept = make_peers(folder, rank, Layout(world, NUM_ROWS, SLOT_BYTES))
    full = make(Case((40,), 9, 20, False), torch.float32, world, split="in")
    try:
        late()
        y = call(full, rank, peers, form, torch.float32)
        bound = rounding_bound(full, torch.float32, partials=world)
        torch.distributed.barrier()  # nobody's memory goes while others read it
        assert ((y.double() - full.exact).abs() <= bound).all(), "wrong result"
    finally:
        matmul_reduce_launch._matmul_reduce_kernel = kernel


@pytest.mark.parametrize("bug", [None, *BUGS])
def test_a_planted_bug_is_seen(ranks: RankPool, tmp_path: Path, bug: str | None) -> None:
    def run(delay_s: float) -> None:
        folder = new_buffers(tmp_path / f"{delay_s}", Layout(3, NUM_ROWS, SLOT_BYTES))
        ranks.run(with_bug, folder, bug, delay_s, ranks=3)

    if bug is None:
        run(0.3)
    else:
        assert_seen("wrong result", run)


def without_rank_1(rank: int, world: int, folder: str, polls: bool) -> tuple[int, bool, float]:
    had_poll = symmetric_flags.HAS_POLL
    symmetric_flags.HAS_POLL = tl.constexpr(polls)
    layout = Layout(world, NUM_ROWS, SLOT_BYTES)
    peers, kept = make_peers(folder, rank, layout, timeout_ns=SECOND_NS // 20000)
    x, weight = torch.randn(20, 4), torch.randn(20, 4)
    results = []
    try:
        if rank != 1:
            for _ in range(2):
                y = torch.zeros(20, 20)
                matmul_all_reduce(Product(x, weight, None), y, peers, form=TWO_SHOT, tile=TILE)
                results.append(y)
    finally:
        symmetric_flags.HAS_POLL = had_poll
        torch.distributed.barrier()
    is_poisoned = all(bool(y.isnan().any()) for y in results)
    return int(peers.error), is_poisoned, float(kept[rank][32])


@pytest.mark.parametrize("polls", [True, False])
def test_a_rank_that_does_not_come_is_named(ranks: RankPool, tmp_path: Path, polls: bool) -> None:
    folder = new_buffers(tmp_path / "buffers", Layout(2, NUM_ROWS, SLOT_BYTES))
    (error, is_poisoned, dead), _ = ranks.run(without_rank_1, folder, polls, ranks=2)
    missed = read_error(error)
    assert missed is not None
    assert (missed.rank, missed.epoch) == (1, 1)
    assert is_poisoned
    assert dead == 1  # the call that died; later ones do not wait again
