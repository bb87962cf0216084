"""The tensor-parallel section of the GPU check, on a CPU: one rank in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from mcp_kernels.gpu_check import tensor_parallel, tensor_parallel_speed
from mcp_kernels.gpu_check.tensor_parallel import Sizes
from mcp_kernels.gpu_check.tensor_parallel_speed import SpeedSizes
from mcp_kernels.gpu_check.timing import Bench

CPU = torch.device("cpu")
TINY = Sizes(
    worlds=(1,),
    shapes=((5, 20, 17),),
    dtypes=(torch.float32,),
    slot_bytes=1 << 16,
    num_rows=129,
    replays=2,
)
TINY_SPEED = SpeedSizes(
    cubes=(16,), worlds=(1,), small_rows=(2,), features=16, inner=16, reduced=64,
    slot_bytes=1 << 16, num_rows=129,
)  # fmt: skip
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="make gpu-check runs it whole")


def test_checks_hold_on_one_rank() -> None:
    checks = list(tensor_parallel.check(CPU, TINY))
    assert [(c.name, c.detail) for c in checks if not c.is_passed] == []
    kinds = {check.name.split(" ")[0] for check in checks}
    ops = {"matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul"}
    assert kinds == ops | {"matmul_reduce_scatter_backward", "a", "its"}


def test_checks_see_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from mcp_kernels.triton import matmul_reduce_launch as launch

    right = launch.matmul_all_reduce

    def wrong(product: Any, y: torch.Tensor, peers: Any, **kwargs: Any) -> None:
        right(product, y, peers, **kwargs)
        y[0, 0] += 0.01

    monkeypatch.setattr(launch, "matmul_all_reduce", wrong)
    assert not any(check.is_passed for check in tensor_parallel.check_all_reduce(CPU, TINY))


def test_speed_is_measured_beside_peers() -> None:
    bench = Bench(CPU, rounds=1, warmup=1)
    measured = list(tensor_parallel_speed.measure(bench, TINY_SPEED))
    assert [set(m.peers) for m in measured] == [{"cuBLAS"}, {"cuBLAS and sum"}, {"F.linear"}]
    assert all(m.ours > 0 for m in measured)
