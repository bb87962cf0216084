"""swiglu: every body against float64 on the same values."""

from __future__ import annotations

import math

import pytest
import torch
from block_inputs import DTYPES, LAYOUTS, assert_within, eps_of, make_rows
from bodies import ISAS, PATHS, running_on
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcp_kernels import reference_only, swiglu, which_backend
from mcp_kernels.testing import assert_same_bits

ops = torch.ops.mcp_kernels
SHAPES = [(1,), (3, 7), (2, 5, 63), (4, 1030)]

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def exact_swiglu(gate, up):
    return gate / (1 + torch.exp(-gate)) * up


def check_bounds(shape, dtype, layout, seed=0, spread=1.0):
    """A result and its gradients, within what the roundings of their arithmetic allow."""
    gate, up, dy = (make_rows(shape, dtype, layout, seed + i, spread) for i in range(3))
    y = swiglu(gate.requires_grad_(), up.requires_grad_())
    dgate, dup = torch.autograd.grad(y, [gate, up], dy)
    assert {y.dtype, dgate.dtype, dup.dtype} == {dtype}

    wide_gate, wide_up = (t.detach().double().requires_grad_() for t in (gate, up))
    exact = exact_swiglu(wide_gate, wide_up)
    exact_dgate, exact_dup = torch.autograd.grad(exact, [wide_gate, wide_up], dy.double())
    out, acc = eps_of(dtype)
    g, u, d = (t.detach().double() for t in (gate, up, dy))
    # The exponent is rounded, and ln 2 is: 0.75 |g| roundings of the power; a few of products.
    power = (0.75 * g.abs() + 8) * acc
    # A power below the normal numbers is 0, and what is taken from it is.
    least = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).smallest_normal
    floor = least * (1 + g.abs()) * (1 + u.abs()) * (1 + d.abs())
    assert_within(y, exact, (out / 2 + power) * exact.abs() + floor, "y")
    assert_within(dup, exact_dup, (out / 2 + power) * exact_dup.abs() + floor, "dup")
    # sigma (1 + g (1 - sigma)): its two terms cancel where silu has its least value.
    sigma = torch.sigmoid(g)
    terms = (d * u * sigma).abs() * (1 + (g * torch.sigmoid(-g)).abs())
    bound = out / 2 * exact_dgate.abs() + 2 * power * terms + floor
    assert_within(dgate, exact_dgate, bound, "dgate")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_and_gradients_are_within_their_bounds(path, dtype):
    with running_on(path):
        for shape in SHAPES:
            check_bounds(shape, dtype, "dense")
        check_bounds((3, 70), dtype, "dense", spread=20.0)
        for layout in LAYOUTS[1:]:
            check_bounds((3, 2, 40), dtype, layout)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    shape=st.lists(st.integers(1, 9), max_size=2).map(tuple),
    width=st.one_of(st.integers(1, 70), st.integers(1000, 1050)),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    path=st.sampled_from(PATHS),
    spread=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 999),
)
def test_any_shape_and_layout(shape, width, dtype, layout, path, spread, seed):
    with running_on(path):
        check_bounds((*shape, width), dtype, layout, seed, spread)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_gates_pass_all_or_nothing(path, dtype):
    gate = torch.tensor([-2e4, -200.0, -90.0, 0.0, 90.0, 200.0, 2e4, math.nan], dtype=dtype)
    up, dy = torch.full_like(gate, 2.0), torch.ones_like(gate)
    with running_on(path):
        y = swiglu(gate, up)
        dgate, dup = ops.swiglu_bwd(dy, gate, up)
    for got, far in ((y, 2 * gate), (dup, gate), (dgate, up)):
        # 90 exp(-90) is 7e-38.
        assert (got[:3].abs() < 1e-36).all()
        torch.testing.assert_close(got[4:7], far[4:7], rtol=2 * torch.finfo(dtype).eps, atol=0)
        assert got[7].isnan()
    assert y[3] == 0
    assert dgate[3] == 1


@pytest.mark.parametrize("path", ISAS)
def test_halves_of_a_packed_tensor_are_read_where_they_are(path):
    packed = make_rows((5, 3, 74), torch.float32)
    gate, up = packed.chunk(2, dim=-1)
    with running_on(path):
        assert_same_bits(swiglu(gate, up), swiglu(gate.contiguous(), up.contiguous()))


@pytest.mark.parametrize("path", ["reference", *ISAS[-1:]])
def test_first_and_second_gradients(path):
    gate, up = (make_rows((2, 5), torch.float64, seed=i).requires_grad_() for i in range(2))
    with running_on(path):
        assert torch.autograd.gradcheck(swiglu, (gate, up))
        assert torch.autograd.gradgradcheck(swiglu, (gate, up))


@pytest.mark.parametrize("path", ["reference", *ISAS[-1:]])
def test_opcheck(path):
    gate, up, dy = (make_rows((3, 7), torch.float32, seed=i) for i in range(3))
    with running_on(path):
        leaves = (gate.clone().requires_grad_(), up.clone().requires_grad_())
        torch.library.opcheck(ops.swiglu.default, leaves)
        torch.library.opcheck(ops.swiglu_bwd.default, (dy, gate, up))


def test_under_compile_and_transforms():
    gate, up = (make_rows((3, 6), torch.float64, seed=i) for i in range(2))

    def loss(gate, up):
        return swiglu(gate * 2, up).sin().sum()

    def exact(gate, up):
        return exact_swiglu(gate * 2, up).sin().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    leaves = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    expected = torch.autograd.grad(exact(*leaves), leaves)
    for got, want in zip(torch.autograd.grad(compiled(*leaves), leaves), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    for argnum in range(2):
        mapped = torch.func.vmap(torch.func.grad(loss, argnum), (0, None))(gate, up[0])
        wanted = torch.func.vmap(torch.func.grad(exact, argnum), (0, None))(gate, up[0])
        torch.testing.assert_close(mapped, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.skipif(not ISAS, reason="the _C extension was not built")
def test_threads_change_no_bit():
    gate, up = (make_rows((300, 700), torch.float32, seed=i) for i in range(2))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(swiglu(gate, up))
    finally:
        torch.set_num_threads(before)
    assert_same_bits(*results)


@pytest.mark.parametrize(
    "gate, up, error, words",
    [
        (torch.ones(2).int(), torch.ones(2).int(), TypeError, "gate must be float64"),
        (torch.ones(()), torch.ones(()), ValueError, "gate must have at least 1 dimension"),
        (torch.ones(2, 3), torch.ones(3), ValueError, "up must be"),
        (torch.ones(3), torch.ones(3).double(), ValueError, "up must be"),
    ],
)
def test_errors_name_the_rule(gate, up, error, words):
    with pytest.raises(error, match=f"swiglu: {words}"):
        swiglu(gate, up)


@pytest.mark.skipif(not ISAS, reason="the _C extension was not built")
def test_the_body_checks_what_reaches_it_and_says_who_it_is():
    gate = torch.ones(2, 3)
    assert which_backend(swiglu, gate, gate).chosen.startswith("cpu:")
    with reference_only():
        assert which_backend(swiglu, gate, gate).chosen == "reference"
    with pytest.raises(RuntimeError, match="swiglu: up must have the shape of gate"):
        ops.swiglu(gate, torch.ones(3, 2))
    with pytest.raises(RuntimeError, match="swiglu_bwd: dy must have dtype code"):
        ops.swiglu_bwd(gate.double(), gate, gate)
    for path in PATHS:
        with running_on(path):
            assert swiglu(torch.empty(0, 3), torch.empty(0, 3)).shape == (0, 3)
