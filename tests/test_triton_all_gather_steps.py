"""Gather and matmul by streams: its copies and flags in Triton's interpreter."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from parallel_matmul import Case, make, rounding_bound
from ranks import RankError, RankPool

pytest.importorskip("triton")

from triton_peers import SECOND_NS, make_peers, new_buffers

from mcp_kernels.symmetric.layout import Layout, read_error
from mcp_kernels.triton import all_gather_matmul as body
from mcp_kernels.triton import all_gather_steps as steps

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")

NUM_ROWS = 33
SLOT_BYTES = 64 << 10

# Shares of several programs, an empty last part, strides; each channel twice and more.
CASES = (
    Case((75,), 12, 9, True),
    Case((4,), 9, 5, False),
    Case((50,), 7, 6, True, is_strided=True),
)


def all_cases(rank: int, world: int, folder: str, dtype: torch.dtype, skips_wait: bool) -> None:
    min_rows = body.MIN_ROWS
    body.MIN_ROWS = 1
    peers, _kept = make_peers(folder, rank, Layout(world, NUM_ROWS, SLOT_BYTES))
    wait = steps._pull_kernel.fn.__globals__["wait_one"]
    if skips_wait:
        steps._pull_kernel.fn.__globals__["wait_one"] = lambda *args: args[4] * 0 + 1
    try:
        for case in CASES:
            full = make(case, dtype, world, split="out")
            local = full.local(rank)
            biases = [] if local.bias is None else [local.bias]
            args = (local.x, [local.weight], biases, peers, 0, case.lead[0], True)
            if skips_wait:
                torch.distributed.barrier()
                time.sleep(0.5 * (rank == 1))  # who does not wait for it is early
            (y,), gathered = body.gather(*args)
            bound = rounding_bound(full, dtype, partials=1)
            exact, most = (full.cut(t, rank, 1) for t in (full.exact, bound))
            assert torch.equal(gathered, full.x), "wrong rows"
            assert ((y.double() - exact).abs() <= most).all(), case
        assert int(peers.error) == 0
    finally:
        body.MIN_ROWS = min_rows
        steps._pull_kernel.fn.__globals__["wait_one"] = wait


@pytest.mark.parametrize("world, dtype", [(2, torch.float32), (3, torch.bfloat16)])
def test_forward(ranks: RankPool, tmp_path: Path, world: int, dtype: torch.dtype) -> None:
    folder = new_buffers(tmp_path / "buffers", Layout(world, NUM_ROWS, SLOT_BYTES))
    ranks.run(all_cases, folder, dtype, False, ranks=world)


def alone(rank: int, world: int, folder: str) -> tuple[int, bool]:
    peers, _kept = make_peers(
        folder, rank, Layout(world, NUM_ROWS, SLOT_BYTES), timeout_ns=SECOND_NS // 20
    )
    rows = torch.zeros(20, 4)
    if rank == 0:
        steps.pull_launch(rows, 1, peers).run(rows.device)
    torch.distributed.barrier()
    return int(peers.error), bool(rows.isnan().all())


def test_a_rank_that_does_not_come_is_named(ranks: RankPool, tmp_path: Path) -> None:
    folder = new_buffers(tmp_path / "buffers", Layout(2, NUM_ROWS, SLOT_BYTES))
    (error, is_nan), _ = ranks.run(alone, folder, ranks=2)
    missed = read_error(error)
    assert missed is not None
    assert (missed.rank, missed.epoch) == (1, 1)
    assert is_nan


def test_a_missing_wait_is_seen(ranks: RankPool, tmp_path: Path) -> None:
    folder = new_buffers(tmp_path / "buffers", Layout(3, NUM_ROWS, SLOT_BYTES))
    with pytest.raises(RankError, match="wrong rows"):
        ranks.run(all_cases, folder, torch.float32, True, ranks=3)
