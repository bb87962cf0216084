"""The fused matmul and reduce-scatter in Triton's interpreter: processes as ranks, real flags."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parallel_matmul import Case, make, rounding_bound
from ranks import RankPool

pytest.importorskip("triton")

from triton_peers import make_peers, new_buffers

from mcp_kernels.ops import _comm
from mcp_kernels.symmetric.layout import Layout
from mcp_kernels.triton.matmul_reduce_launch import Product, matmul_reduce_scatter
from mcp_kernels.triton.matmul_reduce_scatter import gradients, scatter
from mcp_kernels.triton.symmetric_launch import Tile

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")

TILE = Tile(16, 16, 16, 4, 2)
NUM_ROWS = 17
SLOT_BYTES = 9 * 16 * 16 * 4

# Parts of 11 rows and less, an empty last part, no rows, strides, several pieces.
CASES = (
    Case((41,), 19, 23, True),
    Case((3,), 33, 17, True),
    Case((0,), 8, 5, True),
    Case((50,), 12, 34, True, is_strided=True),
)


def all_cases(rank: int, world: int, folder: str, dtype: torch.dtype) -> None:
    peers, _kept = make_peers(folder, rank, Layout(world, NUM_ROWS, SLOT_BYTES))
    for case in CASES:
        full = make(case, dtype, world, split="in")
        local = full.local(rank)
        rows = _comm.split_sizes(case.lead[0], world)[rank]
        y = torch.full((rows, case.out_features), float("nan"), dtype=dtype)
        matmul_reduce_scatter(Product(local.x, local.weight, local.bias), y, peers, tile=TILE)
        assert int(peers.error) == 0
        bound = full.cut(rounding_bound(full, dtype, partials=world), rank, 0)
        exact = full.cut(full.exact, rank, 0)
        assert ((y.double() - exact).abs() <= bound).all(), (case, dtype)


@pytest.mark.parametrize(
    "world, dtype",
    [
        pytest.param(1, torch.float32, marks=pytest.mark.slow),
        pytest.param(2, torch.float16, marks=pytest.mark.slow),
        (3, torch.bfloat16),
        pytest.param(4, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_forward(ranks: RankPool, tmp_path: Path, world: int, dtype: torch.dtype) -> None:
    folder = new_buffers(tmp_path / "buffers", Layout(world, NUM_ROWS, SLOT_BYTES))
    ranks.run(all_cases, folder, dtype, ranks=world)


def every_dim(rank: int, world: int, folder: str) -> None:
    """The op's body with its own tiles: any scatter_dim, parts that differ, the bias once."""
    peers, _kept = make_peers(folder, rank, Layout(world, NUM_ROWS, 64 << 10))
    for case in (Case((5, 2), 9, 7, True, is_strided=True), Case((2, 3), 8, 4, False)):
        full = make(case, torch.float32, world, split="in")
        bound = rounding_bound(full, torch.float32, partials=world)
        for dim in range(3):
            local = full.local(rank)
            y = scatter(local.x, local.weight, local.bias, peers, dim)
            exact, most = (full.cut(t, rank, dim) for t in (full.exact, bound))
            assert y.shape == exact.shape
            assert y.is_contiguous()
            assert ((y.double() - exact).abs() <= most).all(), (case, dim)
    assert int(peers.error) == 0


def test_the_body_scatters_any_dimension(ranks: RankPool, tmp_path: Path) -> None:
    folder = new_buffers(tmp_path / "buffers", Layout(2, NUM_ROWS, 64 << 10))
    ranks.run(every_dim, folder, ranks=2)


def whole_numbers(*shape: int) -> torch.Tensor:
    """Products and sums of these are exact in float32."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-8, 9, shape, generator=generator).float()


def backward(rank: int, world: int, folder: str) -> None:
    """dx, dweight and dbias from this rank's part of dy, whatever dimension was scattered."""
    # The interpreter runs programs one after another, and one waits for all that its peers push.
    peers, _kept = make_peers(folder, rank, Layout(world, 33, 64 << 10), num_programs=1)
    for lead, dim in (((7, 2), 0), ((2, 5), 1), ((3,), 0)):
        dy, x, weight = whole_numbers(*lead, 12), whole_numbers(*lead, 9), whole_numbers(12, 9)
        size = lead[dim]
        part = dy.split(_comm.split_sizes(size, world), dim)[rank]
        needs = [True, dim == 0, size != 5]
        dx, dw, db = gradients(part, x, weight, needs, peers, dim, size)
        assert int(peers.error) == 0
        rows = dy.flatten(0, -2)
        assert torch.equal(dx, dy @ weight), (lead, dim)
        assert torch.equal(dw, rows.t() @ x.flatten(0, -2) if needs[1] else dy.new_empty(0))
        assert torch.equal(db, rows.sum(0) if needs[2] else dy.new_empty(0))


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_backward_multiplies_what_is_gathered(ranks: RankPool, tmp_path: Path, world: int) -> None:
    folder = new_buffers(tmp_path / "buffers", Layout(world, 33, 64 << 10))
    ranks.run(backward, folder, ranks=world)
