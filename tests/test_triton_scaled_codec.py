"""The Triton bodies of int8, int4 and fp8: the reference's bits, cubins for each GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bodies import running_on
from codec_cases import ReduceCase
from test_fp8_compress import TestFp8 as Fp8
from test_int4_compress import TestInt4 as Int4
from test_int8_compress import TestInt8 as Int8
from triton_codecs import assert_equal, compile_for, on_device

from mcp_kernels.testing import make_gradient, make_hostile
from mcp_kernels.triton import scaled_codec as body

CODECS = {
    "int8": (body.INT8, Int8.codec),
    "int4": (body.INT4, Int4.codec),
    "fp8": (body.FP8, Fp8.codec),
}
DTYPES = [torch.float32, torch.bfloat16]  # float16 is read by the same load

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel, block_size", [(9, 8), (300, 24), (1100, 1024)])
def test_compress_gives_the_reference_s_bits(codec, dtype, numel, block_size):
    triton_codec, naive = CODECS[codec]
    largest = torch.finfo(dtype).max / 8
    x = make_hostile(numel, seed=1).clamp(-largest, largest).to(dtype)
    if numel == 300:
        x[150] = float("nan")
    error = make_gradient(numel, seed=2)
    expected_error = error.clone()
    with running_on("reference"):
        codes, scales = naive.op("compress")(x, expected_error, block_size)
        values = naive.op("decompress")(codes, scales, numel, block_size)
    there, own_error, own_codes, own_scales = on_device(x, error, codes, scales)
    result = triton_codec.compress(there, own_error, block_size)
    assert_equal((*result, own_error), (codes, scales, expected_error))
    assert_equal([triton_codec.decompress(own_codes, own_scales, numel, block_size)], [values])


@pytest.mark.parametrize("codec", CODECS)
def test_halves_and_every_code(codec):
    """All codes read alike, and units between two codes round alike, in a block of scale 1."""
    triton_codec, naive = CODECS[codec]
    codes, scales = torch.arange(256, dtype=torch.uint8), torch.full((2,), 0.37)
    numel = 256 * 8 // naive.bits_each
    with running_on("reference"):
        values = naive.op("decompress")(codes, scales, numel, numel // 2)
    there = on_device(codes, scales)
    assert_equal([triton_codec.decompress(*there, numel, numel // 2)], [values])

    legal = torch.from_numpy(naive.legal).sort().values
    legal = legal[legal.isfinite()]
    x = torch.cat([(legal[1:] + legal[:-1]) / 2, legal[-1:]]).float()
    error = torch.zeros(x.numel())
    expected_error = error.clone()
    with running_on("reference"):
        expected = naive.op("compress")(x, expected_error, 1024)
    there, own_error = on_device(x, error)
    assert_equal((*triton_codec.compress(there, own_error, 1024), own_error),
                 (*expected, expected_error))  # fmt: skip


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("bad", [None, float("inf")])
@pytest.mark.parametrize("numel, block_size", [(9, 8), (301, 24)])
def test_reduce_gives_the_reference_s_bits(codec, numel, block_size, counted, bad):
    triton_codec, naive = CODECS[codec]
    case = ReduceCase(naive, numel, block_size, 3, 0, counted)
    if bad is not None:
        case.scales[1, -1] = bad
    with running_on("reference"):
        expected = case.run()
    codes, scales, error, counts = on_device(case.codes, case.scales, case.error, case.counts)
    result = triton_codec.reduce(codes, scales, error, counts, block_size)
    assert_equal((*result, error), expected)


def test_no_elements():
    empty = torch.empty(0)
    for triton_codec, _ in CODECS.values():
        codes, scales = triton_codec.compress(empty, empty, 8)
        assert (codes.numel(), scales.numel()) == (0, 0)
        assert triton_codec.decompress(codes, scales, 0, 8).numel() == 0


CUBINS = """
from mcp_kernels.triton import scaled_codec as body
for codec in (body.INT8, body.INT4, body.FP8):
    pointers = dict(x_ptr="*bf16", rank_scales_ptr="*fp32", counts_ptr="*i32", error_ptr="*fp32",
                    codes_ptr="*u8", scales_ptr="*fp32")
    for reduce in (False, True):
        pointers["x_ptr"] = "*u8" if reduce else "*bf16"
        constants = dict(CODEC=codec.number, REDUCE=reduce, HAS_COUNTS=reduce,
                         P=body.BLOCKS_PER_PROGRAM)
        text = ptx(body._scaled_code_kernel, pointers, constants, floats=("share", "largest"))
        assert "div.rn.f32" in text, text
    ptx(body._scaled_decompress_kernel,
        dict(codes_ptr="*u8", scales_ptr="*fp32", x_ptr="*fp32"),
        dict(CODEC=codec.number, ELEMENTS=body.ELEMENTS_PER_PROGRAM))
"""


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
def test_compiles_for_gpus_without_one(arch, tmp_path):
    compile_for(arch, CUBINS, tmp_path)
