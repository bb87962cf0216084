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
        (2, torch.float16),
        (3, torch.bfloat16),
        pytest.param(4, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_forward(ranks: RankPool, tmp_path: Path, world: int, dtype: torch.dtype) -> None:
    folder = new_buffers(tmp_path / "buffers", Layout(world, NUM_ROWS, SLOT_BYTES))
    ranks.run(all_cases, folder, dtype, ranks=world)
