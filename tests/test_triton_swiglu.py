"""The Triton bodies of swiglu: within the bounds of every other body; cubins for each GPU."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from test_swiglu import check_bounds
from triton_block import TYPES, TritonBodies, compile_for
from triton_codecs import DEVICE

from mcp_kernels.triton import swiglu as body


@pytest.mark.parametrize("dtype", TYPES)
def test_results_and_gradients_are_within_their_bounds(dtype):
    with TritonBodies(body) as bodies:
        for shape in [(1,), (2, 5, 63), (2, 1030)]:
            check_bounds(shape, dtype, "dense")
        check_bounds((3, 70), dtype, "dense", spread=20.0)
        check_bounds((2, 3, 40), dtype, "part of wider rows")
    assert bodies.ran == {"swiglu", "swiglu_bwd"}


def test_far_gates_pass_all_or_nothing():
    gate = torch.tensor([-2e4, -200.0, 200.0, 2e4, math.nan], device=DEVICE)
    up, dy = torch.full_like(gate, 2.0), torch.ones_like(gate)
    y, (dgate, dup) = body.swiglu(gate, up), body.swiglu_bwd(dy, gate, up)
    for got, far in ((y, 2 * gate), (dup, gate), (dgate, up)):
        assert (got[:2] == 0).all()
        torch.testing.assert_close(got[2:4], far[2:4], rtol=2 * 2**-23, atol=0)
        assert got[4].isnan()
    assert body.swiglu(gate[:0], up[:0]).numel() == 0


CUBINS = """
from mcp_kernels.triton import swiglu as body
for element in ("bf16", "fp32"):
    for kernel in (body._swiglu_kernel, body._swiglu_bwd_kernel):
        compiled(kernel, element, COMPUTE=tl.float32, BLOCK=body.ELEMENTS)
"""


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
def test_compiles_for_gpus_without_one(arch, tmp_path):
    compile_for(arch, CUBINS, tmp_path)
