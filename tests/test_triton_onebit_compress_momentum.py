"""The Triton body of onebit_compress_momentum: the reference's bits, cubins for each GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from bodies import running_on
from test_onebit_compress_momentum import BETA1, DTYPES, GRAD_SCALE, Case
from triton_codecs import assert_equal, compile_for, on_device

from mcp_kernels.triton import onebit_compress_momentum as body


def assert_equals_reference(case):
    with running_on("reference"):
        expected = case.run()
    grads = on_device(*case.grads)
    bits, scales, error = on_device(case.bits, case.scales, case.error)
    (factors,) = on_device(case.preconditioner)
    result = body.onebit_compress_momentum(
        grads, bits, scales, error, BETA1, GRAD_SCALE, case.block_size, factors
    )
    assert_equal((*result, error), expected)


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("block_size", [8, 40, 64, 1024])
def test_bits_equal_the_reference(block_size, hostile):
    sizes = [9, 0, 33, 1000, 1] if block_size > 8 else [9, 0, 33]
    how = {"hostile": hostile, "preconditioned": not hostile}
    assert_equals_reference(
        Case(sizes, block_size, dtypes=DTYPES, spare_blocks=3, strided=True, **how)
    )


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_block_that_is_not_finite_keeps_its_error(bad):
    case = Case([192], 64)
    case.grads[0][70] = bad
    assert_equals_reference(case)


def test_no_tensor_is_padding():
    assert_equals_reference(Case([], 64, spare_blocks=2))
    assert_equals_reference(Case([], 64))


CUBINS = """
from mcp_kernels.triton import onebit_compress_momentum as body
for grad in ("*fp32", "*bf16", "*fp16"):
    pointers = dict(grad_ptr=grad, factors_ptr="*bf16", old_bits_ptr="*u8", old_scales_ptr="*fp32",
                    error_ptr="*fp32", bits_ptr="*u8", scales_ptr="*fp32")
    text = ptx(body._onebit_compress_momentum_kernel, pointers,
               {"P": body.BLOCKS_PER_PROGRAM, "HAS_FACTORS": grad != "*fp16"},
               floats=("beta1", "added", "grad_scale"))
    assert "sqrt.rn.f64" in text and "div.rn.f64" in text, text
"""


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
def test_compiles_for_gpus_without_one(arch, tmp_path):
    compile_for(arch, CUBINS, tmp_path)
