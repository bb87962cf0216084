"""onebit_reduce: every body against the definition, bit for bit."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from bodies import PATHS, on_every_path, rms_within_half_an_ulp, running_on
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcp_kernels import onebit_decompress, onebit_reduce, reference_only
from mcp_kernels.testing import assert_same_bits, make_gradient, make_hostile

SIZES = [1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 1000, 2049]

pytestmark = pytest.mark.usefixtures("poisoned_memory")


class Case:
    """Codes of W ranks and the server's state."""

    def __init__(self, numel, block_size, world_size, *, seed=0, hostile=False, counted=False):
        generator = torch.Generator().manual_seed(seed)
        blocks = -(-numel // block_size)
        self.counts = None
        if counted:
            numel = blocks * block_size
            self.counts = torch.randint(0, block_size + 1, (blocks,), generator=generator)
            self.counts = self.counts.int()
        shape = (world_size, -(-numel // 8))
        self.bits = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        make = make_hostile if hostile else make_gradient
        # A quarter: a sum of up to 6 of the largest values stays a float32.
        self.scales = make(world_size * blocks, seed=seed).abs().view(world_size, blocks) / 8
        self.error = make(numel, seed=seed + 1) / 4
        self.block_size = block_size

    def run(self):
        error = self.error.clone()
        bits, scales = onebit_reduce(self.bits, self.scales, error, self.counts, self.block_size)
        return bits, scales, error


def assert_is_the_definition(case, result):
    """numpy's view of the definition, written apart from ours. Finite values only."""
    bits, scales, error = (t.numpy() for t in result)
    numel, size, world_size = case.error.numel(), case.block_size, case.bits.shape[0]
    signs = np.unpackbits(bits, bitorder="little")
    for block in range(len(scales)):
        end = min((block + 1) * size, numel)
        count = end - block * size if case.counts is None else int(case.counts[block])
        span = slice(block * size, block * size + count)
        total = None
        for rank in range(world_size):
            sent = np.unpackbits(case.bits[rank].numpy(), bitorder="little")[span]
            value = np.where(sent, 1, -1).astype(np.float32) * case.scales.numpy()[rank, block]
            total = value if total is None else total + value
        carried = total * np.float32(1 / world_size) + case.error.numpy()[span]
        if count:
            assert rms_within_half_an_ulp(scales[block], carried)
        else:
            assert scales[block] == 0
        np.testing.assert_array_equal(signs[span], carried >= 0)
        back = np.where(carried >= 0, scales[block], -scales[block])
        np.testing.assert_array_equal(error[span], carried - back)
        rest = slice(block * size + count, end)
        np.testing.assert_array_equal(error[rest], case.error.numpy()[rest])
        assert not signs[rest].any()
    assert not signs[numel:].any()


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("numel", SIZES)
def test_mean_and_codes_follow_the_definition(numel, world_size, counted):
    for block_size in (8, 24, 1024):
        case = Case(numel, block_size, world_size, seed=numel, counted=counted)
        assert_is_the_definition(case, on_every_path(case.run))


@pytest.mark.parametrize("world_size", [1, 3])
def test_zeros_denormals_and_large_values(world_size):
    case = Case(3001, 64, world_size, hostile=True)
    assert_is_the_definition(case, on_every_path(case.run))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    numel=st.integers(0, 3000),
    block_size=st.sampled_from([8, 16, 40, 64, 256, 1024, 4096, 1 << 40]),
    world_size=st.integers(1, 6),
    seed=st.integers(0, 2**31),
    hostile=st.booleans(),
    counted=st.booleans(),
    bad=st.sampled_from([None, float("nan"), float("inf")]),
)
def test_any_case_has_equal_bits_everywhere(numel, block_size, counted, bad, **how):
    case = Case(numel, block_size, counted=counted and block_size < 1 << 20, **how)
    if bad is not None and numel:
        case.scales[-1, 0] = bad
    on_every_path(case.run)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_bad_rank_makes_a_bad_block_and_keeps_its_error(bad):
    case = Case(192, 64, 3)
    case.scales[1, 1] = bad
    _, scales, error = on_every_path(case.run)
    assert scales.isnan().tolist() == [False, True, False]
    assert_same_bits(error[64:128], case.error[64:128])


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_lost_over_many_steps(path):
    numel, world_size = 1000, 3
    error = torch.zeros(numel)
    sent, came_in, size = (torch.zeros(numel, dtype=torch.float64) for _ in range(3))
    with running_on(path):
        for step in range(50):
            case = Case(numel, 64, world_size, seed=step)
            for rank in range(world_size):
                value = onebit_decompress(case.bits[rank], case.scales[rank], numel, 64)
                came_in += value.double() / world_size
                # W - 1 sums, the factor and its own rounding, and at W = 3 nothing more.
                size += (world_size + 1) * value.abs()
            size += error.abs()
            bits, scales = onebit_reduce(case.bits, case.scales, error, None, 64)
            back = onebit_decompress(bits, scales, numel, 64)
            sent += back
            size += 2 * (error.abs() + back.abs())
    assert ((sent + error - came_in).abs() <= 2**-24 * size + 1e-30).all()
    assert (sent - came_in).norm() < came_in.norm()


def test_rows_may_be_strided():
    case = Case(1000, 64, 4)
    expected = on_every_path(case.run)
    case.bits = torch.stack((case.bits, case.bits), dim=2)[:, :, 0]
    case.scales = case.scales.t().contiguous().t()
    for got, want in zip(on_every_path(case.run), expected, strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("threads", [2, 3])
def test_bits_do_not_depend_on_the_number_of_threads(threads):
    case = Case(200_003, 1024, 2)
    expected = on_every_path(case.run)
    torch.set_num_threads(threads)
    try:
        for got, want in zip(on_every_path(case.run), expected, strict=True):
            assert_same_bits(got, want)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("mode", [nullcontext, reference_only])
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("numel", [0, 100])
def test_opcheck(mode, numel, counted):
    case = Case(numel, 64, 2, counted=counted)
    with mode():
        torch.library.opcheck(
            torch.ops.mcp_kernels.onebit_reduce.default,
            (case.bits, case.scales, case.error, case.counts, 64),
        )


CASE = Case(24, 8, 2, counted=True)
GOOD = {
    "bits": CASE.bits,
    "scales": CASE.scales,
    "server_error": CASE.error,
    "counts": CASE.counts,
    "block_size": 8,
}


@pytest.mark.parametrize(
    "change, kind, message",
    [
        ({"block_size": 9}, ValueError, "block_size must be a positive multiple of 8, got 9"),
        ({"bits": CASE.bits[0]}, ValueError, "bits must be [W, 3] for a chunk of 24 elements"),
        ({"bits": CASE.bits[:0]}, ValueError, "bits must be [W, 3] for a chunk of 24 elements"),
        ({"bits": CASE.bits.int()}, TypeError, "bits must be torch.uint8, got torch.int32"),
        ({"scales": CASE.scales[:1]}, ValueError, "scales must be [2, 3] for blocks of 8, got"),
        ({"server_error": CASE.error.half()}, TypeError, "server_error must be torch.float32"),
        ({"server_error": CASE.error[:23]}, ValueError, "counts must be 3 values for whole"),
        ({"counts": CASE.counts.long()}, TypeError, "counts must be torch.int32, got"),
        ({"counts": CASE.counts[:2]}, ValueError, "counts must be 3 values for whole blocks"),
    ],
)
def test_refuses_in_words(change, kind, message):
    with pytest.raises(kind) as caught:
        onebit_reduce(**{**GOOD, **change})
    assert str(caught.value).startswith(f"onebit_reduce: {message}")
