"""The Triton body of onebit_reduce: the reference's bits, cubins for each GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from bodies import running_on
from test_onebit_reduce import Case
from triton_codecs import assert_equal, compile_for, on_device

from mcp_kernels.triton import onebit_reduce as body


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("bad", [None, float("inf")])
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("numel, block_size", [(9, 8), (300, 24), (1100, 1024)])
def test_bits_equal_the_reference(numel, block_size, world_size, counted, bad):
    case = Case(numel, block_size, world_size, counted=counted, hostile=bad is None)
    if bad is not None:
        case.scales[-1, -1] = bad
    with running_on("reference"):
        expected = case.run()
    bits, scales, error, counts = on_device(case.bits, case.scales, case.error, case.counts)
    assert_equal((*body.onebit_reduce(bits, scales, error, counts, block_size), error), expected)


CUBINS = """
from mcp_kernels.triton import onebit_reduce as body
pointers = dict(rank_bits_ptr="*u8", rank_scales_ptr="*fp32", counts_ptr="*i32", error_ptr="*fp32",
                bits_ptr="*u8", scales_ptr="*fp32")
text = ptx(body._onebit_reduce_kernel, pointers,
           {"P": body.BLOCKS_PER_PROGRAM, "HAS_COUNTS": True}, floats=("share",))
assert "sqrt.rn.f64" in text and "div.rn.f64" in text, text
"""


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
def test_compiles_for_gpus_without_one(arch, tmp_path):
    compile_for(arch, CUBINS, tmp_path)
