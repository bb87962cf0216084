"""onebit_compress and onebit_decompress: every body against the definition, bit for bit."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from bodies import ISAS, PATHS, rms_within_half_an_ulp, running_on
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcp_kernels import onebit_compress, onebit_decompress, reference_only
from mcp_kernels.testing import assert_same_bits, make_gradient, make_hostile

# 1: one element; 7, 8, 9: around a byte; 31..33: around a row of lanes; 63..65: around a word;
# 1000: a short last block; 1024, 2048: full blocks; 5003: several blocks and a ragged tail.
SIZES = [1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 1000, 1024, 2048, 5003]
BLOCK_SIZES = [8, 24, 32, 64, 1000, 1024, 4096, 1 << 40]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def compress_on(path, x, error, block_size):
    """(bits, scales, new error) of one path; ``error`` itself is left alone."""
    new_error = error.clone()
    with running_on(path):
        bits, scales = onebit_compress(x, new_error, block_size)
    return bits, scales, new_error


def assert_paths_agree(x, error, block_size):
    expected = compress_on("reference", x, error, block_size)
    for path in ISAS:
        actual = compress_on(path, x, error, block_size)
        for name, got, want in zip(("bits", "scales", "error"), actual, expected, strict=True):
            assert_same_bits(got, want, f"{name} on {path}, N={x.numel()}, block {block_size}")
    return expected


def assert_is_the_definition(x, error, block_size, result):
    """numpy's view of the definition, written apart from ours. Finite values only."""
    bits, scales, new_error = (t.numpy() for t in result)
    carried = x.float().numpy().ravel() + error.numpy().ravel()
    np.testing.assert_array_equal(bits, np.packbits(carried >= 0, bitorder="little"))
    for block in range(len(scales)):
        span = slice(block * block_size, (block + 1) * block_size)
        assert rms_within_half_an_ulp(scales[block], carried[span])
        sent = np.where(carried[span] >= 0, scales[block], -scales[block])
        np.testing.assert_array_equal(new_error.ravel()[span], carried[span] - sent)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_bits_scales_and_error_follow_the_definition(numel, block_size):
    x, error = make_gradient(numel, seed=1), make_gradient(numel, seed=2)
    result = assert_paths_agree(x, error, block_size)
    assert_is_the_definition(x, error, block_size, result)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 9, 1000, 5003])
def test_narrow_inputs_are_widened_exactly(numel, dtype):
    x, error = make_gradient(numel, seed=3, dtype=dtype), make_gradient(numel, seed=4)
    result = assert_paths_agree(x, error, 1024)
    assert_is_the_definition(x, error, 1024, result)


@pytest.mark.parametrize("block_size", [8, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_16_bit_pattern_is_read_alike(dtype, block_size):
    if dtype == torch.float32:
        x = make_hostile(1 << 16, seed=5)
    else:
        x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    assert_paths_agree(x, torch.zeros(1 << 16), block_size)


@pytest.mark.parametrize("block_size", [8, 64, 1024])
def test_zeros_denormals_and_the_largest_values(block_size):
    x, error = make_hostile(3001, seed=6), make_hostile(3001, seed=7) / 16
    result = assert_paths_agree(x, error, block_size)
    assert_is_the_definition(x, error, block_size, result)
    assert result[1].isfinite().all()


@pytest.mark.parametrize("path", PATHS)
def test_both_zeros_are_positive_and_a_zero_block_stays_zero(path):
    x = torch.tensor([0.0, -0.0] * 8)
    bits, scales, error = compress_on(path, x, -torch.zeros(16), 8)
    assert bits.tolist() == [255, 255]
    assert scales.tolist() == [0.0, 0.0]
    assert (error == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 63, 1023])
def test_a_block_that_is_not_finite_says_so_and_keeps_its_error(bad, at):
    x, error = make_gradient(3072, seed=8), make_gradient(3072, seed=9)
    x[1024 + at] = bad
    bits, scales, new_error = assert_paths_agree(x, error, 1024)
    assert scales.isfinite().tolist() == [True, False, True]
    assert scales.isnan().tolist() == [False, True, False]
    assert_same_bits(new_error[1024:2048], error[1024:2048])
    assert new_error.isfinite().all()
    # The sign bits stay what they are: +inf counts as positive, NaN and -inf do not.
    np.testing.assert_array_equal(
        bits.numpy(), np.packbits((x + error).numpy() >= 0, bitorder="little")
    )


def test_a_sum_that_overflows_float32_is_not_finite():
    x = torch.full((8,), 3e38)
    _, scales, new_error = assert_paths_agree(x, x.clone(), 8)
    assert scales.isnan().all()
    assert_same_bits(new_error, x)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    numel=st.integers(0, 3000),
    block_size=st.integers(1, 200).map(lambda eighths: 8 * eighths),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
    hostile=st.booleans(),
)
def test_any_size_and_block_size(numel, block_size, dtype, seed, hostile):
    make = make_hostile if hostile else make_gradient
    x, error = make(numel, seed=seed).to(dtype), make_gradient(numel, seed=seed + 1)
    assert_paths_agree(x, error, block_size)
    bits, scales, _ = compress_on("reference", x, error, block_size)
    assert_decompressed_alike(bits, scales, numel, block_size)


def assert_decompressed_alike(bits, scales, numel, block_size):
    with running_on("reference"):
        expected = onebit_decompress(bits, scales, numel, block_size)
    for path in ISAS:
        with running_on(path):
            actual = onebit_decompress(bits, scales, numel, block_size)
        assert_same_bits(actual, expected, f"{path}, N={numel}, block {block_size}")
    return expected


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_decompress_is_numpys_unpackbits_times_the_scale(numel, block_size):
    generator = np.random.default_rng(numel)
    bits = generator.integers(0, 256, -(-numel // 8), dtype=np.uint8)
    scales = generator.random(-(-numel // block_size), dtype=np.float32)
    actual = assert_decompressed_alike(
        torch.from_numpy(bits), torch.from_numpy(scales), numel, block_size
    )
    signs = np.unpackbits(bits, bitorder="little", count=numel).astype(np.float32) * 2 - 1
    blocks = np.arange(numel) // block_size
    np.testing.assert_array_equal(actual.numpy(), signs * scales[blocks])


def test_decompress_passes_a_scale_that_is_not_finite_on():
    bits = torch.tensor([0b10101010, 0xFF], dtype=torch.uint8)
    result = assert_decompressed_alike(bits, torch.tensor([float("nan"), 2.0]), 16, 8)
    assert result[:8].isnan().all()
    assert result[8:].tolist() == [2.0] * 8


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_lost_over_many_steps(path):
    """Error feedback: what was sent plus what is kept equals what was put in."""
    numel, num_steps = 3000, 50
    error, sent = torch.zeros(numel), torch.zeros(numel, dtype=torch.float64)
    total = torch.zeros(numel, dtype=torch.float64)
    size = torch.zeros(numel, dtype=torch.float64)
    with running_on(path):
        for step in range(num_steps):
            x = make_gradient(numel, seed=step)
            size += (x.double() + error.double()).abs()
            bits, scales = onebit_compress(x, error, 256)
            sent += onebit_decompress(bits, scales, numel, 256)
            total += x
            size += error.abs()
    # Each step rounds twice (c = x + error, error' = c -+ scale), half an ulp of the result each.
    bound = 2**-24 * size + 1e-30
    assert ((sent + error - total).abs() <= bound).all()
    assert (sent - total).norm() < total.norm()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_are_read_in_logical_order(path, dtype):
    base = make_gradient(6000, seed=10, dtype=dtype)
    views = [
        base.view(60, 100).t(),
        base[::3],
        base.view(20, 30, 10)[:, 5:17, ::2],
        base[:1].expand(77),
        base[7:],  # an unaligned start
    ]
    for view in views:
        error = make_gradient(view.numel(), seed=11).view(view.shape)
        from_view = compress_on(path, view, error, 64)
        from_copy = compress_on(path, view.contiguous().view(-1), error.view(-1), 64)
        for got, want in zip(from_view, from_copy, strict=True):
            assert_same_bits(got.view(-1), want.view(-1))


@pytest.mark.parametrize("path", PATHS)
def test_no_elements_give_no_bits(path):
    with running_on(path):
        bits, scales = onebit_compress(torch.empty(0, 3), torch.empty(0))
        assert (bits.shape, bits.dtype) == ((0,), torch.uint8)
        assert (scales.shape, scales.dtype) == ((0,), torch.float32)
        assert onebit_decompress(bits, scales, 0).shape == (0,)


@pytest.mark.parametrize("path", PATHS)
def test_x_may_be_the_error_itself(path):
    start = make_gradient(3000, seed=12)
    expected = compress_on("reference", start, start, 1024)
    shared = start.clone()
    with running_on(path):
        bits, scales = onebit_compress(shared, shared)
    for got, want in zip((bits, scales, shared), expected, strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("path", PATHS)
def test_no_gradient_flows(path):
    x = make_gradient(100).requires_grad_()
    with running_on(path):
        bits, scales = onebit_compress(x, torch.zeros(100))
        rebuilt = onebit_decompress(bits, scales.requires_grad_(), 100)
    assert not rebuilt.requires_grad


@pytest.mark.parametrize("threads", [2, 3])
def test_bits_do_not_depend_on_the_number_of_threads(threads):
    numel = 300_000  # more than one grain of parallel_for
    x, error = make_gradient(numel, seed=13), make_gradient(numel, seed=14)
    expected = compress_on("reference", x, error, 1024)
    torch.set_num_threads(threads)
    try:
        for path in PATHS:
            for got, want in zip(compress_on(path, x, error, 1024), expected, strict=True):
                assert_same_bits(got, want, path)
            with running_on(path):
                rebuilt = onebit_decompress(expected[0], expected[1], numel)
            signs = np.unpackbits(expected[0].numpy(), bitorder="little", count=numel)
            np.testing.assert_array_equal(rebuilt.numpy() > 0, signs > 0)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("numel", [0, 9, 3000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", [nullcontext, reference_only])
def test_opcheck(numel, dtype, mode):
    x, error = make_gradient(numel, dtype=dtype), make_gradient(numel)
    with mode():
        bits, scales = onebit_compress(x, error)
        ops = torch.ops.mcp_kernels
        torch.library.opcheck(ops.onebit_compress.default, (x, error, 1024))
        torch.library.opcheck(ops.onebit_decompress.default, (bits, scales, numel, 1024))
        out = torch.empty(numel)
        torch.library.opcheck(ops.onebit_decompress_into.default, (bits, scales, 1024, out))
        ops.onebit_decompress_into(bits, scales, 1024, out)
        assert_same_bits(out, onebit_decompress(bits, scales, numel))


def test_a_compiled_function_gives_the_same_bits():
    x, error = make_gradient(3000, seed=15), make_gradient(3000, seed=16)
    expected = compress_on("reference", x, error, 64)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x, error):
        bits, scales = onebit_compress(x, error, 64)
        return bits, scales, onebit_decompress(bits, scales, x.numel(), 64)

    bits, scales, rebuilt = step(x, error)
    for got, want in zip((bits, scales, error), expected, strict=True):
        assert_same_bits(got, want)
    assert_same_bits(rebuilt, onebit_decompress(bits, scales, 3000, 64))


X, ERROR = torch.zeros(16), torch.zeros(16)
BITS, SCALES = torch.zeros(2, dtype=torch.uint8), torch.zeros(1)


@pytest.mark.parametrize(
    "args, kind, message",
    [
        ((X, ERROR, 12), ValueError, "block_size must be a positive multiple of 8, got 12; use 8"),
        ((X, ERROR, 0), ValueError, "block_size must be a positive multiple of 8, got 0; use 8"),
        ((X, ERROR, -8), ValueError, "block_size must be a positive multiple of 8, got -8"),
        ((X, ERROR, 8.0), TypeError, "block_size must be an int, got float"),
        ((X, ERROR, True), TypeError, "block_size must be an int, got bool"),
        (([0.0], ERROR), TypeError, "x must be a Tensor, got list"),
        ((X.double(), ERROR), TypeError, "x must be float32, bfloat16 or float16, got torch.fl"),
        ((X.to_sparse(), ERROR), ValueError, "x must be a strided tensor, got torch.sparse_coo"),
        ((X, None), TypeError, "error must be a Tensor, got NoneType"),
        ((X, ERROR.half()), TypeError, "error must be float32, got torch.float16; make it by"),
        ((X, ERROR[:8]), ValueError, "error must be as large as x (16 elements), got 8"),
        ((X, ERROR.to("meta")), ValueError, "error must be on x's device cpu, got meta"),
        ((X, torch.zeros(4, 4).t()), ValueError, "error must be contiguous since it is updated"),
        ((X, torch.zeros(16).requires_grad_()), ValueError, "error must not require grad"),
    ],
)
def test_compress_refuses_in_words(args, kind, message):
    with pytest.raises(kind) as caught:
        onebit_compress(*args)
    assert str(caught.value).startswith(f"onebit_compress: {message}")


@pytest.mark.parametrize(
    "args, kind, message",
    [
        ((BITS, SCALES, 16, 9), ValueError, "block_size must be a positive multiple of 8, got 9"),
        ((None, SCALES, 16), TypeError, "bits must be a Tensor, got NoneType"),
        ((BITS.int(), SCALES, 16), TypeError, "bits must be torch.uint8, got torch.int32"),
        ((BITS, SCALES.double(), 16), TypeError, "scales must be torch.float32, got torch.float6"),
        ((BITS, SCALES, "16"), TypeError, "numel must be an int, got str"),
        ((BITS, SCALES, -1), ValueError, "numel must be >= 0, got -1"),
        ((BITS, SCALES, 17), ValueError, "bits must be 3 bytes for numel=17, got 2"),
        (
            (BITS, SCALES, 16, 8),
            ValueError,
            "scales must be 2 values for numel=16 and block_size=8",
        ),
        ((BITS, SCALES.to("meta"), 16), ValueError, "scales must be on the device of bits (cpu)"),
    ],
)
def test_decompress_refuses_in_words(args, kind, message):
    with pytest.raises(kind) as caught:
        onebit_decompress(*args)
    assert str(caught.value).startswith(f"onebit_decompress: {message}")
