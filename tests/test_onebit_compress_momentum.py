"""onebit_compress_momentum: every body against the definition, bit for bit."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from bodies import PATHS, on_every_path, rms_within_half_an_ulp, running_on
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcp_kernels import onebit_compress_momentum, onebit_decompress, reference_only
from mcp_kernels.ops.block_layout import BlockLayout
from mcp_kernels.testing import assert_same_bits, make_gradient, make_hostile

# 0: nothing; 1; 7..9: around a byte; 31..33: around a row of lanes; 63..65: around a word; more
# than one block of each size below, ragged.
SIZES = [0, 1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 1000, 2049]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BETA1, GRAD_SCALE = 0.9, 0.37

pytestmark = pytest.mark.usefixtures("poisoned_memory")


class Case:
    """Gradients and a state as a step of the optimizer meets them."""

    def __init__(self, sizes, block_size, *, dtypes=(torch.float32,), spare_blocks=0, **how):
        make = make_hostile if how.get("hostile") else make_gradient
        seed = how.get("seed", 0)
        self.layout = BlockLayout(sizes, block_size)
        blocks, elements = self.layout.num_blocks + spare_blocks, self.layout.padded_numel
        elements += spare_blocks * block_size
        self.grads = []
        for i, size in enumerate(sizes):
            dtype = dtypes[i % len(dtypes)]
            largest = torch.finfo(dtype).max
            self.grads.append(make(size, seed=seed + i).clamp(-largest, largest).to(dtype))
        if how.get("strided"):
            self.grads = [torch.stack((g, g), dim=1)[:, 1] for g in self.grads]
        generator = torch.Generator().manual_seed(seed)
        self.bits = torch.randint(0, 256, (elements // 8,), dtype=torch.uint8, generator=generator)
        self.scales = make_gradient(blocks, seed=seed + 100).abs()
        self.scales[:: how.get("zero_every", 5)] = 0.0
        self.counts = torch.zeros(blocks, dtype=torch.int64)
        self.counts[: self.layout.num_blocks] = self.layout.counts()
        self.valid = torch.arange(block_size) < self.counts[:, None]
        self.error = make(elements, seed=seed + 200) * self.valid.view(-1) / 4
        self.block_size = block_size
        self.preconditioner = None
        if how.get("preconditioned"):
            factors = make_gradient(elements, seed=seed + 300).abs().mul_(30)
            factors[::11] = 0.0  # a masked coordinate
            self.preconditioner = factors.to(torch.bfloat16)

    def run(self, **how):
        """(bits, scales, new error); the case itself is left alone."""
        error = self.error.clone()
        given = {"beta1": BETA1, "grad_scale": GRAD_SCALE, **how}
        given["preconditioner"] = self.preconditioner
        bits, scales = onebit_compress_momentum(
            *(self.grads, self.bits, self.scales, error), block_size=self.block_size, **given
        )
        return bits, scales, error


def assert_is_the_definition(case, result):
    """numpy's view of the definition, written apart from ours. Finite values only."""
    bits, scales, error = (t.numpy() for t in result)
    size, f32 = case.block_size, np.float32
    old_signs = np.unpackbits(case.bits.numpy(), bitorder="little").astype(f32) * 2 - 1
    new_signs = np.unpackbits(bits, bitorder="little").astype(bool)
    grads = np.zeros(case.error.numel(), f32)
    for grad, at in zip(case.grads, case.layout.offsets, strict=True):
        grads[at : at + grad.numel()] = grad.float().numpy()
    for block, count in enumerate(case.counts.tolist()):
        start = block * size
        span, padding = slice(start, start + count), slice(start + count, start + size)
        momentum = old_signs[span] * case.scales.numpy()[block]
        kept = f32(BETA1) * momentum
        seen = grads[span] * f32(GRAD_SCALE)
        if case.preconditioner is not None:
            seen *= case.preconditioner[span].float().numpy()
        added = f32(1 - BETA1) * seen
        carried = (kept + added) + case.error.numpy()[span]
        if count:
            assert rms_within_half_an_ulp(scales[block], carried)
        else:
            assert scales[block] == 0
        np.testing.assert_array_equal(new_signs[span], carried >= 0)
        sent = np.where(carried >= 0, scales[block], -scales[block])
        np.testing.assert_array_equal(error[span], carried - sent)
        assert not new_signs[padding].any()
        np.testing.assert_array_equal(error[padding], case.error.numpy()[padding])


@pytest.mark.parametrize("block_size", [8, 24, 64, 1024])
@pytest.mark.parametrize("hostile, preconditioned", [(False, False), (True, False), (False, True)])
def test_many_tensors_follow_the_definition(block_size, hostile, preconditioned):
    how = {"hostile": hostile, "preconditioned": preconditioned}
    case = Case(SIZES, block_size, dtypes=DTYPES, spare_blocks=3, **how)
    result = on_every_path(case.run)
    assert result[1].isfinite().all()
    assert_is_the_definition(case, result)


@pytest.mark.parametrize("size", SIZES)
def test_one_tensor_follows_the_definition(size):
    for block_size in (8, 1024):
        case = Case([size], block_size, seed=size, preconditioned=block_size > 8)
        assert_is_the_definition(case, on_every_path(case.run))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.lists(st.one_of(st.sampled_from(SIZES), st.integers(0, 700)), max_size=5),
    block_size=st.sampled_from([8, 16, 40, 64, 256, 1024, 4096]),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3),
    spare_blocks=st.integers(0, 2),
    seed=st.integers(0, 2**31),
    hostile=st.booleans(),
    strided=st.booleans(),
    preconditioned=st.booleans(),
    bad=st.sampled_from([None, float("nan"), float("inf"), float("-inf")]),
    beta1=st.sampled_from([0.0, 0.9, 1.0, 0.123]),
)
def test_any_case_has_equal_bits_everywhere(sizes, bad, beta1, block_size, **how):
    case = Case(sizes, block_size, **how)
    if bad is not None and case.grads and case.grads[-1].numel():
        case.grads[-1].view(-1)[case.grads[-1].numel() // 2] = bad
    on_every_path(lambda: case.run(beta1=beta1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_block_that_is_not_finite_says_so_and_keeps_its_error(bad):
    case = Case([3 * 256], 256)
    case.grads[0][300] = bad
    _, scales, error = on_every_path(case.run)
    assert scales.isnan().tolist() == [False, True, False]
    assert_same_bits(error[256:512], case.error[256:512])
    assert not torch.equal(error[:256], case.error[:256])


def test_a_momentum_of_scale_nan_is_a_bad_block():
    case = Case([512], 256)
    case.scales[1] = float("nan")
    _, scales, error = on_every_path(case.run)
    assert scales.isnan().tolist() == [False, True]
    assert_same_bits(error[256:], case.error[256:])


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_lost_over_many_steps(path):
    """What was sent plus what is kept equals what came in, to the roundings of each step."""
    sizes, steps = [700, 9, 300], 40
    case = Case(sizes, 64)
    bits, scales, error = case.bits, torch.zeros_like(case.scales), torch.zeros_like(case.error)
    applied = torch.zeros(error.numel(), dtype=torch.float64)
    came_in, size = applied.clone(), applied.clone()
    with running_on(path):
        for step in range(steps):
            old = onebit_decompress(bits, scales, error.numel(), 64) * case.valid.view(-1)
            grads = torch.zeros_like(error)
            for i, at in enumerate(case.layout.offsets):
                case.grads[i] = make_gradient(sizes[i], seed=10 * step + i)
                grads[at : at + sizes[i]] = case.grads[i]
            bits, scales = onebit_compress_momentum(
                case.grads, bits, scales, error, beta1=0.5, block_size=64
            )
            applied += onebit_decompress(bits, scales, error.numel(), 64) * case.valid.view(-1)
            came_in += 0.5 * old.double() + 0.5 * grads.double()  # exact factors
            size += old.abs() + grads.abs() + 2 * error.abs()
            size += onebit_decompress(bits, scales, error.numel(), 64)
    # Three roundings a step: two sums and the subtraction, half an ulp each of what they give.
    assert ((applied + error - came_in).abs() <= 3 * 2**-24 * size.abs() + 1e-30).all()
    assert came_in.abs().sum() > 0


@pytest.mark.parametrize("threads", [2, 3])
def test_bits_do_not_depend_on_the_number_of_threads(threads):
    case = Case([150_001, 3, 90_000], 1024, preconditioned=True)
    expected = on_every_path(case.run)
    torch.set_num_threads(threads)
    try:
        for got, want in zip(on_every_path(case.run), expected, strict=True):
            assert_same_bits(got, want)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("mode", [nullcontext, reference_only])
@pytest.mark.parametrize("sizes, preconditioned", [([], False), ([9, 0, 100], True)])
def test_opcheck(mode, sizes, preconditioned):
    case = Case(sizes, 64, dtypes=DTYPES, preconditioned=preconditioned)
    with mode():
        torch.library.opcheck(
            torch.ops.mcp_kernels.onebit_compress_momentum.default,
            (case.grads, case.bits, case.scales, case.error, 0.9, 1.0, 64, case.preconditioner),
        )


def test_no_gradient_flows():
    case = Case([100], 64)
    case.grads[0].requires_grad_()
    assert not case.run()[1].requires_grad


CASE = Case([16, 8], 8)
GOOD = {
    "grads": CASE.grads,
    "bits": CASE.bits,
    "scales": CASE.scales,
    "error": CASE.error,
    "beta1": 0.9,
    "block_size": 8,
}


@pytest.mark.parametrize(
    "change, kind, message",
    [
        ({"block_size": 12}, ValueError, "block_size must be a positive multiple of 8, got 12"),
        ({"bits": CASE.bits.int()}, TypeError, "bits must be torch.uint8, got torch.int32"),
        ({"bits": CASE.bits[:2]}, ValueError, "bits must be 3 bytes for 3 blocks of 8, got 2"),
        ({"scales": CASE.scales.double()}, TypeError, "scales must be torch.float32, got"),
        ({"error": CASE.error[:16]}, ValueError, "error must have 24 elements, got 16"),
        ({"error": CASE.error.to("meta")}, ValueError, "error must be on cpu as the rest is"),
        ({"error": torch.zeros(4, 6).t()}, ValueError, "error must be contiguous; make it by"),
        (
            {"error": torch.zeros(24, requires_grad=True)},
            ValueError,
            "error must not require grad since it is updated in place",
        ),
        ({"grads": [CASE.grads[0].double()]}, TypeError, "grads must be float32, bfloat16 or"),
        ({"grads": [None]}, TypeError, "grads must be a Tensor, got NoneType"),
        (
            {"preconditioner": CASE.error},
            TypeError,
            "preconditioner must be torch.bfloat16, got torch.float32",
        ),
        (
            {"preconditioner": CASE.error[:16].bfloat16()},
            ValueError,
            "preconditioner must have 24 elements, got 16",
        ),
        ({"grads": [torch.zeros(25)]}, ValueError, "grads must fit 3 blocks of 8, got 4; make"),
    ],
)
def test_refuses_in_words(change, kind, message):
    with pytest.raises(kind) as caught:
        onebit_compress_momentum(**{**GOOD, **change})
    assert str(caught.value).startswith(f"onebit_compress_momentum: {message}")
