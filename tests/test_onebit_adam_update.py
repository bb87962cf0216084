"""onebit_adam_update: every body against the definition, bit for bit."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from bodies import on_every_path
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcp_kernels import onebit_adam_update, reference_only
from mcp_kernels.ops.block_layout import BlockLayout
from mcp_kernels.testing import assert_same_bits, make_gradient, make_hostile

SIZES = [0, 1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 1000, 2049]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LR, STEP_SIZE = 3e-2, 2.7e-2

pytestmark = pytest.mark.usefixtures("poisoned_memory")


class Case:
    """Parameters and a frozen state."""

    def __init__(
        self,
        sizes,
        block_size,
        *,
        seed=0,
        hostile=False,
        dtypes=None,
        strided=False,
        divides=True,
        masked=False,
    ):
        layout = BlockLayout(sizes, block_size)
        make = make_hostile if hostile else make_gradient
        generator = torch.Generator().manual_seed(seed)
        elements = layout.padded_numel
        self.layout, self.block_size = layout, block_size
        self.bits = torch.randint(0, 256, (elements // 8,), dtype=torch.uint8, generator=generator)
        self.scales = make(layout.num_blocks, seed=seed).abs()
        self.scales[::5] = 0.0
        self.denom = make_gradient(elements, seed=seed + 1).abs() + 1e-8
        self.denom[::7] = float("inf")
        if not divides:
            self.denom = None
        self.moves = None
        if masked:
            self.moves = torch.randint(0, 256, self.bits.shape, generator=generator).byte()
        self.weight_decays = [0.1 * (i % 3) for i in range(len(sizes))]
        values = [make(size, seed=seed + 2 + i) for i, size in enumerate(sizes)]
        self.master = None
        if dtypes:
            self.master = make(elements, seed=seed + 3)
            kinds = [dtypes[i % len(dtypes)] for i in range(len(sizes))]
            values = [v.to(kind) for v, kind in zip(values, kinds, strict=True)]
        self.params = values
        self.strided = strided

    def run(self):
        """(master, *params) after the step; the case itself is left alone."""
        params = [p.clone() for p in self.params]
        if self.strided:
            params = [torch.stack((p, p), dim=1)[:, 1] for p in params]
        master = None if self.master is None else self.master.clone()
        onebit_adam_update(
            *(params, self.denom, self.bits, self.scales),
            lr=LR,
            step_size=STEP_SIZE,
            weight_decays=self.weight_decays,
            block_size=self.block_size,
            master=master,
            moves=self.moves,
        )
        # A NaN is a NaN: its payload is a machine's own.
        results = [*params, *([] if master is None else [master])]
        return tuple(torch.where(r.isnan(), torch.full_like(r, float("nan")), r) for r in results)


def expected_params(case):
    """numpy's view of the definition, written apart from ours."""
    signs = np.unpackbits(case.bits.numpy(), bitorder="little").astype(np.float32) * 2 - 1
    momentum = signs * case.scales.numpy().repeat(case.block_size)
    for param, at, decay in zip(case.params, case.layout.offsets, case.weight_decays, strict=True):
        span = slice(at, at + param.numel())
        old = (param if case.master is None else case.master[span]).numpy()
        update = momentum[span] * np.float32(STEP_SIZE)
        if case.denom is not None:
            update = update / case.denom.numpy()[span]
        if case.moves is not None:
            moves = np.unpackbits(case.moves.numpy(), bitorder="little").astype(bool)
            update = np.where(moves[span], update, np.float32(0))
        yield old * np.float32(1 - LR * decay) - update


MODES = [{}, {"divides": False}, {"divides": False, "masked": True}]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("block_size", [8, 24, 64, 1024])
def test_many_tensors_follow_the_definition(block_size, strided, mode):
    case = Case(SIZES, block_size, strided=strided, **mode)
    for got, want in zip(on_every_path(case.run), expected_params(case), strict=True):
        np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.parametrize("mode", [MODES[0], MODES[2]], ids=str)
@pytest.mark.parametrize("block_size", [8, 64, 1024])
def test_master_weights_move_and_params_are_their_rounding(block_size, mode):
    case = Case(SIZES, block_size, dtypes=DTYPES, **mode)
    *params, master = on_every_path(case.run)
    moved = torch.zeros(master.numel(), dtype=torch.bool)
    for param, at, want in zip(params, case.layout.offsets, expected_params(case), strict=True):
        span = slice(at, at + param.numel())
        moved[span] = True
        np.testing.assert_array_equal(master[span].numpy(), want)
        rounded = torch.from_numpy(want).to(param.dtype)
        np.testing.assert_array_equal(param.float().numpy(), rounded.float().numpy())
    assert_same_bits(master[~moved], case.master[~moved])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_to_nearest_even_everywhere(dtype):
    """Every value of the narrow type, the midpoints between, and their neighbours."""
    narrow = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    narrow = narrow[narrow.isfinite()]
    ordered = narrow.sort().values
    middle = ((ordered[1:].double() + ordered[:-1].double()) / 2).float()
    values = torch.cat([narrow, middle, *(middle.nextafter(torch.tensor(s)) for s in (-9e9, 9e9))])
    values = torch.cat([values, torch.tensor([65519.996, 65520.0, 1e38, 3.4e38, -3.4e38])])
    case = Case([values.numel()], 64, dtypes=[dtype])
    case.scales.zero_()
    case.weight_decays = [0.0]
    case.master[: values.numel()] = values
    param, _ = on_every_path(case.run)
    np.testing.assert_array_equal(param.float().numpy(), values.to(dtype).float().numpy())


def test_an_infinite_denominator_masks_and_a_zero_scale_moves_nothing():
    case = Case([640], 64)
    case.weight_decays = [0.0]
    (param,) = on_every_path(case.run)
    masked = case.denom.isinf() | (case.scales == 0).repeat_interleave(64)
    assert_same_bits(param[masked], case.params[0][masked])
    assert (param[~masked] != case.params[0][~masked]).any()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.lists(st.one_of(st.sampled_from(SIZES), st.integers(0, 700)), max_size=5),
    block_size=st.sampled_from([8, 16, 40, 64, 256, 1024]),
    dtypes=st.one_of(st.none(), st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3)),
    seed=st.integers(0, 2**31),
    hostile=st.booleans(),
    strided=st.booleans(),
    divides=st.booleans(),
    masked=st.booleans(),
    bad=st.booleans(),
)
def test_any_case_has_equal_bits_everywhere(sizes, block_size, bad, **how):
    case = Case(sizes, block_size, **how)
    if bad and case.scales.numel():
        case.scales[-1] = float("nan")
    on_every_path(case.run)


@pytest.mark.parametrize("threads", [2, 3])
def test_bits_do_not_depend_on_the_number_of_threads(threads):
    case = Case([150_001, 3, 90_000], 1024)
    expected = on_every_path(case.run)
    torch.set_num_threads(threads)
    try:
        for got, want in zip(on_every_path(case.run), expected, strict=True):
            assert_same_bits(got, want)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("mode", [nullcontext, reference_only])
@pytest.mark.parametrize("dtypes", [None, DTYPES])
@pytest.mark.parametrize("sizes", [[], [9, 0, 100]])
def test_opcheck(mode, sizes, dtypes):
    case = Case(sizes, 64, dtypes=dtypes, divides=dtypes is None, masked=dtypes is not None)
    with mode():
        torch.library.opcheck(
            torch.ops.mcp_kernels.onebit_adam_update.default,
            (
                *(case.params, case.denom, case.bits, case.scales, LR, STEP_SIZE),
                *(case.weight_decays, 64, case.master, case.moves),
            ),
        )


def test_a_parameter_that_requires_grad_moves_under_no_grad():
    case = Case([100], 64)
    expected = case.run()[0]
    case.params = [torch.nn.Parameter(case.params[0])]
    with torch.no_grad():
        assert_same_bits(case.run()[0], expected)


CASE = Case([16, 8], 8)
GOOD = {
    "params": CASE.params,
    "denom": CASE.denom,
    "bits": CASE.bits,
    "scales": CASE.scales,
    "lr": 0.1,
    "step_size": 0.1,
    "weight_decays": [0.0, 0.0],
    "block_size": 8,
}


@pytest.mark.parametrize(
    "change, kind, message",
    [
        ({"block_size": 0}, ValueError, "block_size must be a positive multiple of 8, got 0"),
        ({"denom": CASE.denom[:16]}, ValueError, "denom must have 24 elements, got 16"),
        ({"denom": CASE.denom.half()}, TypeError, "denom must be torch.float32, got torch.float"),
        ({"moves": CASE.bits[:2]}, ValueError, "moves must have 3 bytes, got 2"),
        ({"moves": CASE.bits.int()}, TypeError, "moves must be torch.uint8, got torch.int32"),
        ({"master": CASE.denom[:16]}, ValueError, "master must have 24 elements, got 16"),
        ({"bits": CASE.bits[:2]}, ValueError, "bits must be 3 bytes for 3 blocks of 8, got 2"),
        ({"weight_decays": [0.0]}, ValueError, "weight_decays must be 2 values, one a parameter"),
        (
            {"params": [torch.zeros(16).bfloat16(), CASE.params[1]]},
            TypeError,
            "params must be float32 without master, got torch.bfloat16; keep float32 weights",
        ),
        (
            {"params": [torch.zeros(16, requires_grad=True), CASE.params[1]]},
            ValueError,
            "params must not require grad since it is updated in place",
        ),
        (
            {"params": [torch.zeros(25)], "weight_decays": [0.0]},
            ValueError,
            "params must fit 3 blocks of 8, got 4; make the buffers by BlockLayout",
        ),
    ],
)
def test_refuses_in_words(change, kind, message):
    with pytest.raises(kind) as caught:
        onebit_adam_update(**{**GOOD, **change})
    assert str(caught.value).startswith(f"onebit_adam_update: {message}")
