"""rotary: every body gives the bits of the definition, which is a rotation."""

from __future__ import annotations

import pytest
import torch
from block_inputs import DTYPES, LAYOUTS, make_rows
from bodies import ISAS, PATHS, on_every_path, running_on
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcp_kernels import reference_only, rotary, which_backend

ops = torch.ops.mcp_kernels
# Halves of a head that are a part of a register, one, several and what is none of these.
SIZES = [2, 6, 8, 16, 32, 64, 74, 128]

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def tables(rows, size, dtype, theta=50.0):
    exponent = torch.arange(0, size, 2, dtype=torch.float64) / size
    angle = torch.outer(torch.arange(rows, dtype=torch.float64), theta**-exponent)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return angle.cos().to(wide), angle.sin().to(wide)


def check(batch, rows, heads, kv_heads, size, dtype, layout, seed=0):
    """Bits on every path, and complex numbers' rotation within the roundings of its formula."""
    q, dq = (make_rows((batch, rows, heads, size), dtype, layout, seed + i) for i in (0, 1))
    k, dk = (make_rows((batch, rows, kv_heads, size), dtype, layout, seed + i) for i in (2, 3))
    cos, sin = tables(rows, size, dtype)

    def run():
        leaves = q.requires_grad_(), k.requires_grad_()
        turned = rotary(*leaves, cos, sin)
        return *(t.detach() for t in turned), *torch.autograd.grad(turned, leaves, (dq, dk))

    found = on_every_path(run)
    turn = torch.complex(cos.double(), sin.double())[:, None]
    out = torch.finfo(dtype).eps
    acc = torch.finfo(cos.dtype).eps
    for got, x, by in zip(
        found, (q, k, dq, dk), (turn, turn, turn.conj(), turn.conj()), strict=True
    ):
        wide = x.detach().double()
        z = torch.complex(wide[..., : size // 2], wide[..., size // 2 :]) * by
        exact = torch.cat([z.real, z.imag], -1)
        # Two products and a sum, each as large as the pair at most; then one rounding.
        bound = out / 2 * exact.abs() + 2 * acc * z.abs().repeat(1, 1, 1, 2)
        least = torch.finfo(dtype).smallest_normal * out
        assert ((got.double() - exact).abs() <= bound + least).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_body_rotates_bit_for_bit(size, dtype):
    check(2, 3, 4, 2, size, dtype, "dense")


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_heads_that_lie_apart(layout):
    check(2, 3, 4, 1, 16, torch.float32, layout)
    check(2, 3, 4, 1, 16, torch.bfloat16, layout)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.tuples(*[st.integers(1, 5)] * 4),
    half=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 999),
)
def test_any_shape_and_layout(sizes, half, dtype, layout, seed):
    batch, rows, heads, kv_heads = sizes
    check(batch, rows, heads, kv_heads, 2 * half, dtype, layout, seed)


@pytest.mark.parametrize("path", ["reference", *ISAS[-1:]])
def test_gradients_of_any_order(path):
    q = make_rows((2, 3, 2, 4), torch.float64).requires_grad_()
    k = make_rows((2, 3, 1, 4), torch.float64, seed=1).requires_grad_()
    cos, sin = tables(3, 4, torch.float64)
    with running_on(path):
        assert torch.autograd.gradcheck(lambda q, k: rotary(q, k, cos, sin), (q, k))
        assert torch.autograd.gradgradcheck(lambda q, k: rotary(q, k, cos, sin), (q, k))


def test_one_of_the_two_may_need_no_gradient():
    q, k = make_rows((1, 3, 2, 4), torch.float64).requires_grad_(), torch.ones(1, 3, 1, 4).double()
    cos, sin = tables(3, 4, torch.float64)
    turned, _ = rotary(q, k, cos, sin)
    [grad] = torch.autograd.grad(turned.square().sum() / 2, q)
    torch.testing.assert_close(grad, q.detach(), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("path", ["reference", *ISAS[-1:]])
def test_opcheck(path):
    q, k = make_rows((2, 3, 2, 4), torch.float32), make_rows((2, 3, 1, 4), torch.float32)
    with running_on(path):
        leaves = q.requires_grad_(), k.requires_grad_()
        for back in (False, True):
            args = (*leaves, *tables(3, 4, torch.float32), back)
            torch.library.opcheck(ops.rotary.default, args)


def test_under_compile_and_transforms():
    q, k = make_rows((2, 3, 2, 4), torch.float64), make_rows((2, 3, 1, 4), torch.float64, seed=1)
    cos, sin = tables(3, 4, torch.float64)

    def loss(q, k, cos=cos):
        q, k = rotary(q, k, cos, sin)
        return (q.sin() * k.exp()).sum()

    leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for got, want in zip(torch.autograd.grad(compiled(*leaves), leaves), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-14)
    many, more = torch.stack([q, q + 1]), torch.stack([cos, 2 * cos])
    mapped = torch.func.vmap(torch.func.grad(loss), (1, None))(many.movedim(0, 1), k)
    each = [torch.func.grad(loss)(one, k) for one in many]
    torch.testing.assert_close(mapped, torch.stack(each), rtol=1e-13, atol=1e-14)
    mapped = torch.func.vmap(loss, (None, None, 0))(q, k, more)
    torch.testing.assert_close(mapped, torch.stack([loss(q, k, one) for one in more]))


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"q": torch.ones(2, 3, 2, 4).int()}, TypeError, "q must be float64"),
        ({"q": torch.ones(2, 3, 2, 5)}, ValueError, r"q must be \[B, S, H, K\]"),
        ({"k": torch.ones(2, 4, 1, 4)}, ValueError, r"k must be \[B, S, N, K\]"),
        ({"k": torch.ones(2, 3, 1, 4).double()}, TypeError, "k must be torch.float32"),
        ({"cos": torch.ones(4, 2)}, ValueError, r"cos must be \[S, K / 2\] = \[3, 2\]"),
        ({"sin": torch.ones(3, 2).bfloat16()}, TypeError, "sin must be torch.float32"),
    ],
)
def test_errors_name_the_rule(change, error, words):
    cos, sin = tables(3, 4, torch.float32)
    args = {"q": torch.ones(2, 3, 2, 4), "k": torch.ones(2, 3, 1, 4), "cos": cos, "sin": sin}
    with pytest.raises(error, match=f"rotary: {words}"):
        rotary(**(args | change))


@pytest.mark.skipif(not ISAS, reason="the _C extension was not built")
def test_the_body_checks_what_reaches_it_and_says_who_it_is():
    q, k = torch.ones(2, 3, 2, 4), torch.ones(2, 3, 1, 4)
    cos, sin = tables(3, 4, torch.float32)
    assert which_backend(rotary, q, k, cos, sin).chosen.startswith("cpu:")
    with reference_only():
        assert which_backend(rotary, q, k, cos, sin).chosen == "reference"
    with pytest.raises(RuntimeError, match=r"rotary: cos must be \[3, 2\]"):
        ops.rotary(q, k, cos[:2], sin, False)
    with pytest.raises(RuntimeError, match="rotary: k must be 3 in dimension 1"):
        ops.rotary(q, k[:, :2], cos, sin, False)
    for path in PATHS:
        with running_on(path):
            assert rotary(q[:0], k[:0], cos, sin)[0].shape == (0, 3, 2, 4)
