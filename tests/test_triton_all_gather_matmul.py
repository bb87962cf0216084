"""The fused gather and matmul in Triton's interpreter: a process for each program of each rank."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_matmul import Case, make, rounding_bound
from ranks import RankPool
from torch import Tensor

pytest.importorskip("triton")

from triton_peers import assert_seen, make_peers, new_buffers, planted

from mcp_kernels.symmetric.layout import Layout
from mcp_kernels.triton import all_gather_matmul_kernel, all_gather_matmul_launch
from mcp_kernels.triton.all_gather_matmul import gather
from mcp_kernels.triton.all_gather_matmul_launch import launches
from mcp_kernels.triton.matmul_reduce_launch import Product
from mcp_kernels.triton.symmetric_launch import Tile

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")

TILE = Tile(16, 16, 16, 4, 2)
NUM_ROWS = 33
SLOT_BYTES = 4096  # some cases go in several windows

# Parts that do not fit tiles, an empty last part, no rows, strides, several windows.
CASES = (
    Case((41,), 12, 37, True),
    Case((3,), 20, 17, False),
    Case((0,), 8, 5, True),
    Case((53,), 40, 19, True, is_strided=True),
)


def share(
    rank: int, programs: int, program: int, folder: str, world: int, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """One program of one rank, alone in its process: what it wrote of y and of the gathered x."""
    layout = Layout(world, NUM_ROWS, SLOT_BYTES)
    peers, _kept = make_peers(folder, rank, layout, num_programs=programs)
    ys, all_gathered = [], []
    for case in CASES:
        local = make(case, dtype, world, split="out").local(rank)
        size = case.lead[0]
        y = torch.zeros(size, local.weight.shape[0], dtype=dtype)
        gathered = torch.zeros(size, case.in_features, dtype=dtype)
        product = Product(local.x, local.weight, local.bias)
        for launch in launches(product, y, gathered, peers, tile=TILE):
            if program < launch.args["num_programs"]:
                replace(launch, num_programs=1, args={**launch.args, "first_program": program}).run(
                    y.device
                )
            # A stream starts no launch before all programs of the one before have ended.
            torch.distributed.barrier()
        assert int(peers.error) == 0
        ys.append(y)
        all_gathered.append(gathered)
    return ys, all_gathered


def run_share(process: int, processes: int, folder: str, world: int, dtype: torch.dtype) -> Any:
    programs = processes // world
    return share(process // programs, programs, process % programs, folder, world, dtype)


@pytest.mark.parametrize(
    "world, programs, dtype",
    [
        (1, 1, torch.float32),
        (2, 2, torch.float32),
        pytest.param(3, 1, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(2, 1, torch.float16, marks=pytest.mark.slow),
        pytest.param(4, 1, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_forward(
    ranks: RankPool, tmp_path: Path, world: int, programs: int, dtype: torch.dtype
) -> None:
    folder = new_buffers(tmp_path / "buffers", Layout(world, NUM_ROWS, SLOT_BYTES))
    results = ranks.run(run_share, folder, world, dtype, ranks=world * programs)
    for index, case in enumerate(CASES):
        full = make(case, dtype, world, split="out")
        bound = rounding_bound(full, dtype, partials=1)
        for rank in range(world):
            # Each element was written by one program; the others left zero.
            of_rank = results[rank * programs : (rank + 1) * programs]
            y = sum(ys[index].double() for ys, _ in of_rank)
            exact, most = (full.cut(t, rank, 1) for t in (full.exact, bound))
            assert ((y - exact).abs() <= most).all(), (case, rank)
            gathered = sum(g[index].double() for _, g in of_rank)
            assert torch.equal(gathered, full.x.double()), (case, rank)


BUGS = {
    "rotation of the read": (
        "held = mine + (source * window",
        "held = mine + (source_at(rank, turn, WORLD) * window",
    ),
    "no wait": ("alive = wait_pieces(", "wait_nothing("),
}


def with_bug(rank: int, world: int, folder: str, bug: str | None, delay_s: float) -> None:
    right, wrong = BUGS[bug] if bug else ("held", "held")
    module: Any = planted(all_gather_matmul_kernel, right, wrong, folder)
    module.wait_nothing = lambda *args: None
    kernel = all_gather_matmul_launch._all_gather_matmul_kernel
    all_gather_matmul_launch._all_gather_matmul_kernel = module._all_gather_matmul_kernel
    peers, _kept = make_peers(folder, rank, Layout(world, NUM_ROWS, SLOT_BYTES), num_programs=1)
    full = make(Case((40,), 9, 20, False), torch.float32, world, split="out")
    local = full.local(rank)
    y = torch.zeros(40, local.weight.shape[0])
    if rank == 1:
        time.sleep(delay_s)  # who does not wait for it is early
    try:
        for launch in launches(Product(local.x, local.weight, None), y, None, peers, tile=TILE):
            launch.run(y.device)
        torch.distributed.barrier()  # nobody's memory goes while others read it
        bound = rounding_bound(full, torch.float32, partials=1)
        exact, most = (full.cut(t, rank, 1) for t in (full.exact, bound))
        assert ((y.double() - exact).abs() <= most).all(), "wrong result"
    finally:
        all_gather_matmul_launch._all_gather_matmul_kernel = kernel


@pytest.mark.parametrize("bug", [None, *BUGS])
def test_a_planted_bug_is_seen(ranks: RankPool, tmp_path: Path, bug: str | None) -> None:
    def run(delay_s: float) -> None:
        folder = new_buffers(tmp_path / f"{delay_s}", Layout(2, NUM_ROWS, SLOT_BYTES))
        ranks.run(with_bug, folder, bug, delay_s, ranks=2)

    if bug is None:
        run(0.3)
    else:
        assert_seen("wrong result", run)


def every_dim(rank: int, world: int, folder: str) -> None:
    """The op's body with its own tiles: any row dimension, several weights, x kept or not."""
    peers, _kept = make_peers(folder, rank, Layout(world, NUM_ROWS, 64 << 10), num_programs=1)
    for case in (Case((5, 2), 9, 7, True, is_strided=True), Case((2, 4), 8, 4, False)):
        for dim in range(2):
            full = make(case, torch.float32, world, split="out", dim=dim)
            local = full.local(rank)
            weights = [local.weight, 2 * local.weight]
            biases = [] if local.bias is None else [local.bias, 2 * local.bias]
            bound = rounding_bound(full, torch.float32, partials=1)
            exact, most = (full.cut(t, rank, 2) for t in (full.exact, bound))
            for count in (1, 2):
                args = (local.x, weights[:count], biases[:count], peers, dim, case.lead[dim])
                ys, gathered = gather(*args, save_gathered=count == 1)
                for index, y in enumerate(ys):
                    error = (y.double() / (index + 1) - exact).abs()
                    assert (error <= most).all(), (case, dim, count)
                    assert y.is_contiguous()
                assert torch.equal(gathered, full.x)
    assert int(peers.error) == 0


def test_the_body_gathers_any_row_dimension(ranks: RankPool, tmp_path: Path) -> None:
    folder = new_buffers(tmp_path / "buffers", Layout(2, NUM_ROWS, 64 << 10))
    ranks.run(every_dim, folder, ranks=2)
