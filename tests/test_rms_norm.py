"""rms_norm and add_rms_norm: every body against float64 on the same values."""

from __future__ import annotations

import math

import pytest
import torch
from block_inputs import DTYPES, LAYOUTS, assert_within, eps_of, make_rows
from bodies import ISAS, PATHS, running_on
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcp_kernels import add_rms_norm, reference_only, rms_norm, which_backend
from mcp_kernels.testing import assert_same_bits

ops = torch.ops.mcp_kernels
EPS = 1e-3
SHAPES = [(1,), (3, 1), (2, 5, 63), (7, 130), (1, 1000)]

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def exact_norm(s, weight):
    return s / (s.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def check_bounds(shape, dtype, weight_dtype, layout, adds, seed=0, spread=1.0):
    """Results and gradients of one call, within what the roundings of its arithmetic allow."""
    x, residual, dy, dsum = (
        make_rows(shape, dtype, layout, seed + i, spread if i < 2 else 1.0) for i in range(4)
    )
    weight = make_rows(shape[-1:], weight_dtype, seed=seed + 4)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    if adds:
        y, s = add_rms_norm(x, residual.requires_grad_(), weight, EPS)
        assert_same_bits(s.detach(), (x + residual).detach().contiguous())
        with torch.no_grad():
            assert_same_bits(y.detach(), rms_norm(s, weight, EPS))
        dx, dweight, dresidual = torch.autograd.grad([y, s], [*leaves, residual], [dy, dsum])
        assert_same_bits(dx, dresidual)
    else:
        y, s = rms_norm(x, weight, EPS), x
        dx, dweight = torch.autograd.grad(y, leaves, dy)
    assert (y.dtype, dx.dtype, dweight.dtype) == (dtype, dtype, weight_dtype)

    wide_s, wide_w = (t.detach().double().requires_grad_() for t in (s, weight))
    exact = exact_norm(wide_s, wide_w)
    exact_ds, exact_dw = torch.autograd.grad(exact, [wide_s, wide_w], dy.double())
    out, acc = eps_of(dtype)
    width = shape[-1]
    r = (wide_s.square().mean(-1, keepdim=True) + EPS).rsqrt()
    # The sum of D squares errs by a random walk of sqrt(D) roundings, its root by half of that; a
    # few products follow.
    assert_within(y, exact, (out / 2 + (math.sqrt(width) / 2 + 4) * acc) * exact.abs(), "y")
    direct = (r * dy.double() * wide_w).abs()
    projected = (dy.double() * wide_w * wide_s).abs().sum(-1, keepdim=True) * r**3 / width
    terms = direct + wide_s.abs() * projected
    if adds:
        exact_ds = exact_ds + dsum.double()
        terms = terms + dsum.double().abs()
    bound = out / 2 * exact_ds.abs() + (math.sqrt(width) + 8) * acc * terms
    assert_within(dx, exact_ds, bound.detach(), "dx")
    summed = (dy.double() * wide_s * r).abs().reshape(-1, width)
    walk = math.sqrt(len(summed)) + math.sqrt(width) + 4
    bound = eps_of(weight_dtype)[0] / 2 * exact_dw.abs() + walk * acc * summed.sum(0)
    assert_within(dweight, exact_dw, bound.detach(), "dweight")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_and_gradients_are_within_their_bounds(path, dtype):
    with running_on(path):
        for shape in SHAPES:
            for adds in (False, True):
                check_bounds(shape, dtype, dtype, "dense", adds)
        for layout in LAYOUTS[1:]:
            check_bounds((3, 2, 40), dtype, dtype, layout, adds=True)


@pytest.mark.parametrize("path", PATHS)
def test_many_rows_add_up_to_the_weight_gradient(path):
    """More rows than one task takes, and than all tasks of its usual size."""
    with running_on(path):
        check_bounds((1, 333, 24), torch.float32, torch.float32, "dense", adds=False)
        check_bounds((5003, 3), torch.bfloat16, torch.float32, "dense", adds=True)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    shape=st.lists(st.integers(1, 9), max_size=2).map(tuple),
    width=st.one_of(st.integers(1, 70), st.integers(250, 300)),
    dtype=st.sampled_from(DTYPES),
    narrow_weight=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
    adds=st.booleans(),
    path=st.sampled_from(PATHS),
    spread=st.sampled_from([1e-2, 1.0, 100.0]),
    seed=st.integers(0, 999),
)
def test_any_shape_and_layout(shape, width, dtype, narrow_weight, layout, adds, path, spread, seed):
    weight_dtype = dtype if narrow_weight or dtype == torch.float64 else torch.float32
    with running_on(path):
        check_bounds((*shape, width), dtype, weight_dtype, layout, adds, seed, spread)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e16])
def test_gradient_at_every_size_of_float32(path, size):
    """Against float64 on the same values; the gradient of x has x's size inverted."""
    generator = torch.Generator().manual_seed(6)
    x, dy = torch.randn(2, 4, 33, generator=generator)
    weight = 1 + 0.1 * torch.randn(33, generator=generator)
    found = []
    with running_on(path):
        for dtype in (torch.float32, torch.float64):
            leaf = (x * size).to(dtype).requires_grad_()
            y = rms_norm(leaf, weight.to(dtype), 1e-30)
            found += torch.autograd.grad(y, leaf, dy.to(dtype))
    # Sums of 33 products and a dozen roundings, of terms that are each as large as |dy| / |x|.
    torch.testing.assert_close(found[0].double() * size, found[1] * size, rtol=0, atol=2e-5)


def test_is_torch_s_norm_and_a_row_of_zeros_divides_by_eps_alone():
    x, weight = make_rows((3, 5), torch.float64), make_rows((5,), torch.float64, seed=1)
    expected = torch.nn.functional.rms_norm(x, (5,), weight, EPS)
    torch.testing.assert_close(rms_norm(x, weight, EPS), expected, rtol=1e-14, atol=1e-14)
    zeros = torch.zeros(4, 5, dtype=torch.float64, requires_grad=True)
    [grad] = torch.autograd.grad(rms_norm(zeros, weight, EPS).sum(), zeros)
    torch.testing.assert_close(grad, (weight / math.sqrt(EPS)).expand(4, 5), rtol=1e-14, atol=0)


@pytest.mark.parametrize("path", PATHS)
def test_nan_and_infinity_stay_in_their_row(path):
    x = make_rows((4, 37), torch.float32)
    x[1, 36], x[2, 0] = math.nan, math.inf
    with running_on(path):
        y = rms_norm(x, torch.ones(37), EPS)
    assert y[1].isnan().all()
    assert y[2, 0].isnan()
    assert y[[0, 3]].isfinite().all()


@pytest.mark.parametrize("path", ["reference", *ISAS[-1:]])
def test_first_and_second_gradients(path):
    x, residual = (make_rows((2, 3, 5), torch.float64, seed=i).requires_grad_() for i in range(2))
    weight = make_rows((5,), torch.float64, seed=2).requires_grad_()
    with running_on(path):
        for function, args in (
            (lambda x, w: rms_norm(x, w, EPS), (x, weight)),
            (lambda x, r, w: add_rms_norm(x, r, w, EPS), (x, residual, weight)),
        ):
            assert torch.autograd.gradcheck(function, args)
            assert torch.autograd.gradgradcheck(function, args)


def test_only_what_is_used_is_differentiated():
    x, weight = make_rows((2, 5), torch.float64), make_rows((5,), torch.float64, seed=1)
    _, s = add_rms_norm(x.requires_grad_(), torch.ones_like(x), weight, EPS)
    assert torch.equal(torch.autograd.grad(s.sum(), x)[0], torch.ones_like(x))
    assert weight.grad is None
    assert not torch.ops.mcp_kernels.rms_norm(x, weight, EPS)[1].requires_grad


@pytest.mark.parametrize("path", ["reference", *ISAS[-1:]])
def test_opcheck(path):
    x, dy = (make_rows((3, 7), torch.float32, seed=i) for i in range(2))
    weight = make_rows((7,), torch.float32, seed=2)
    scale = torch.ones(3)
    with running_on(path):
        leaves = (x.clone().requires_grad_(), weight.clone().requires_grad_(), EPS)
        torch.library.opcheck(ops.rms_norm.default, leaves)
        torch.library.opcheck(ops.add_rms_norm.default, (leaves[0], dy, *leaves[1:]))
        for dsum in (None, dy):
            torch.library.opcheck(ops.rms_norm_bwd.default, (dy, dsum, x, weight, scale, EPS))


def test_under_compile_and_transforms():
    x, residual = (make_rows((3, 4, 6), torch.float64, seed=i) for i in range(2))
    weight = make_rows((6,), torch.float64, seed=2)

    def loss(x, residual, weight):
        y, s = add_rms_norm(x, residual, weight, EPS)
        return (rms_norm(y, weight, EPS).sin() * s).sum()

    def exact(x, residual, weight):
        s = x + residual
        return (exact_norm(exact_norm(s, weight), weight).sin() * s).sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    leaves = [t.clone().requires_grad_() for t in (x, residual, weight)]
    expected = torch.autograd.grad(exact(*leaves), leaves)
    for got, want in zip(torch.autograd.grad(compiled(*leaves), leaves), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    for in_dims, args in (
        ((0, None, None), (x, residual[0], weight)),
        ((1, 0, None), (x.movedim(0, 1), residual, weight)),
    ):
        for argnum in range(3):
            mapped = torch.func.vmap(torch.func.grad(loss, argnum), in_dims)(*args)
            wanted = torch.func.vmap(torch.func.grad(exact, argnum), in_dims)(*args)
            torch.testing.assert_close(mapped, wanted, rtol=1e-12, atol=1e-13)
    many = torch.stack([weight, 2 * weight, weight - 1])
    got = torch.func.vmap(lambda x, w: rms_norm(x, w, EPS))(x, many)
    torch.testing.assert_close(got, exact_norm(x, many[:, None]), rtol=1e-13, atol=1e-14)


@pytest.mark.skipif(not ISAS, reason="the _C extension was not built")
def test_threads_change_no_bit():
    x, weight = make_rows((700, 96), torch.float32), make_rows((96,), torch.float32, seed=1)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
            y = rms_norm(*leaves, EPS)
            results.append([y.detach(), *torch.autograd.grad(y.square().sum(), leaves)])
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert_same_bits(one, two)


def test_empty_rows():
    weight = torch.ones(3, requires_grad=True)
    for path in PATHS:
        with running_on(path):
            y = rms_norm(torch.empty(0, 3, requires_grad=True), weight, EPS)
            assert y.shape == (0, 3)
            assert torch.equal(torch.autograd.grad(y.sum(), weight)[0], torch.zeros(3))


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: rms_norm(torch.ones(2, 3).int(), torch.ones(3)), TypeError, "x must be float64"),
        (lambda: rms_norm(torch.ones(2, 3), torch.ones(4)), ValueError, r"weight must be \[D\]"),
        (lambda: rms_norm(torch.ones(()), torch.ones(())), ValueError, r"weight must be \[D\]"),
        (
            lambda: rms_norm(torch.ones(2, 3), torch.ones(3).double()),
            TypeError,
            "weight must be float32",
        ),
        (
            lambda: add_rms_norm(torch.ones(2, 3), torch.ones(1, 3), torch.ones(3)),
            ValueError,
            "residual must be",
        ),
    ],
)
def test_errors_name_the_rule(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.skipif(not ISAS, reason="the _C extension was not built")
def test_the_body_checks_what_reaches_it_and_says_who_it_is():
    x, weight = torch.ones(2, 3), torch.ones(3)
    assert which_backend(rms_norm, x, weight).chosen.startswith("cpu:")
    with reference_only():
        assert which_backend(rms_norm, x, weight).chosen == "reference"
    with pytest.raises(RuntimeError, match="rms_norm: weight must be"):
        ops.rms_norm(x, torch.ones(2), EPS)
    with pytest.raises(RuntimeError, match="add_rms_norm: residual must have the shape of x"):
        ops.add_rms_norm(x, torch.ones(3, 2), weight, EPS)
    with pytest.raises(RuntimeError, match="rms_norm_bwd: scale must have 2 elements"):
        ops.rms_norm_bwd(x, None, x, weight, torch.ones(3), EPS)
