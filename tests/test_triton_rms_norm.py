"""The Triton bodies of rms_norm: within the bounds of every other body; cubins for each GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from test_rms_norm import check_bounds
from triton_block import TYPES, TritonBodies, compile_for
from triton_codecs import DEVICE

from mcp_kernels.triton import rms_norm as body
from mcp_kernels.triton.rms_norm_refuses import MOST_FEATURES, refuses, refuses_backward


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("adds", [False, True])
def test_results_and_gradients_are_within_their_bounds(dtype, adds):
    with TritonBodies(body) as bodies:
        for shape in [(1,), (3, 1), (2, 5, 63), (2, 130)]:
            check_bounds(shape, dtype, dtype, "dense", adds)
        check_bounds((2, 3, 40), dtype, dtype, "every other feature", adds)
        if dtype != torch.float64:
            check_bounds((3, 20), dtype, torch.float32, "dense", adds)
    assert bodies.ran == {"rms_norm", "rms_norm_bwd"} | ({"add_rms_norm"} if adds else set())


def test_parts_hold_several_rows(monkeypatch):
    monkeypatch.setattr(body, "MOST_PARTS", 4)
    with TritonBodies(body):
        check_bounds((11, 9), torch.float32, torch.float32, "dense", adds=True)


def test_no_rows():
    x, weight = torch.empty(0, 3, device=DEVICE), torch.ones(3, device=DEVICE)
    y, scale = body.rms_norm(x, weight, 1e-5)
    assert (y.shape, scale.shape) == ((0, 3), (0,))
    assert torch.equal(body.rms_norm_bwd(x, None, x, weight, scale, 1e-5)[1].cpu(), torch.zeros(3))


def test_rows_that_do_not_fit_into_registers_are_left_to_the_reference():
    for width, words in ((MOST_FEATURES, None), (MOST_FEATURES + 1, "needs at most 16384")):
        x = torch.empty(1, width)
        for answer in (refuses(x, x[0], 1e-5), refuses_backward(x, None, x)):
            assert (answer is None) if words is None else words in str(answer)


CUBINS = """
from mcp_kernels.triton import rms_norm as body
for element in ("bf16", "fp32"):
    compiled(body._norm_kernel, element, ADDS=True, COMPUTE=tl.float32, BLOCK=4096)
    compiled(body._norm_bwd_kernel, element, HAS_DSUM=True, COMPUTE=tl.float32, BLOCK=4096)
"""


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
def test_compiles_for_gpus_without_one(arch, tmp_path):
    compile_for(arch, CUBINS, tmp_path)
