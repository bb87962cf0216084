"""bfloat16 attention on every instruction set, and the body whose products are of bfloat16.

That body rounds P and dS on their way into a product. With u = 2^-9 at most, each product is off by
the roundings of many independent terms, in the norm as much as by the one rounding of the result:
sqrt(2) of it together where terms have random signs, so 1.5 of it are allowed.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from naive_attention import naive_attention
from test_attention import CASES, Case, make, weigh
from test_flash_attn_cpu import (
    BEST_SHAPES,
    ISAS,
    THREAD_CASES,
    assert_within_bounds,
    draw,
    exact_attention,
    run,
    running_on,
    test_threads_do_not_change_a_bit,
)
from torch import Tensor

from mcp_kernels import flash_attn_func, flash_attn_varlen_func, which_backend
from mcp_kernels.testing import assert_same_bits

PAIRS = "avx512_bf16"
NOT_HERE = "this CPU multiplies no pairs of bfloat16"
# The other file's test runs there, and here on another instruction set.
threads_do_not_change_a_bit = test_threads_do_not_change_a_bit
del test_threads_do_not_change_a_bit

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(not ISAS, reason="a pure-Python install has no compiled body"),
]
only_pairs = pytest.mark.skipif(PAIRS not in ISAS, reason=NOT_HERE)


def relative(got: Tensor, exact: Tensor) -> float:
    return float((got.detach().double() - exact).norm() / exact.norm())


def plain_attention(leaves: tuple[Tensor, ...], dout: Tensor, causal: bool) -> list[Tensor]:
    """Matrix products and softmax in bfloat16, as torch runs them; gradients by autograd."""
    q, k, v = (t.detach().transpose(1, 2).requires_grad_() for t in leaves)
    wide_k, wide_v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    s = q @ wide_k.mT * q.shape[3] ** -0.5
    if causal:
        rows, keys = s.shape[-2:]
        visible = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        s = s.masked_fill(~visible, -math.inf)
    out = (s.softmax(-1) @ wide_v).transpose(1, 2)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    return [out, *(grad.transpose(1, 2) for grad in grads)]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "sizes",
    [(1, 300, 301, 4, 2, 64, 64), (1, 257, 257, 2, 2, 128, 128), (2, 200, 333, 2, 1, 59, 40)],
)
@pytest.mark.parametrize("isa", ISAS)
def test_results_are_as_good_as_rounded_once(
    isa: str, sizes: tuple[int, ...], causal: bool
) -> None:
    *leaves, dout = draw(*sizes, dtype=torch.bfloat16)
    exact = exact_attention(tuple(leaves), dout, causal=causal)
    with running_on(isa):
        out, _, *grads = run(tuple(leaves), dout, causal=causal)
    plain = plain_attention(tuple(leaves), dout, causal)
    wanted = (exact.out, *exact.grads)
    for got, other, right in zip((out, *grads), plain, wanted, strict=True):
        error, once = relative(got, right), relative(right.bfloat16(), right)
        assert error <= 1.5 * once
        assert error <= 2.5e-3
        assert error <= relative(other, right)


@only_pairs
@pytest.mark.parametrize(
    "kwargs", [{}, {"window": (100, 30)}, {"window": (63, -1)}, {"window": (-1, 5)}], ids=str
)
@pytest.mark.parametrize("sizes", [*BEST_SHAPES, (1, 91, 90, 3, 1, 15, 17)], ids=str)
def test_windows_splits_and_parts_in_pairs(kwargs: dict[str, Any], sizes: tuple[int, ...]) -> None:
    """Windows of odd ends and groups of three leave tiles that begin and end within a pair."""
    *leaves, dout = draw(*sizes, dtype=torch.bfloat16)
    if sizes[1] > sizes[2] and kwargs.get("window", (-1, -1))[1] >= 0:
        leaves[0], dout = leaves[0][:, -sizes[2] :], dout[:, -sizes[2] :]
    exact = exact_attention(tuple(leaves), dout, **kwargs)
    with running_on(PAIRS):
        got = run(tuple(leaves), dout, window_size=kwargs.get("window", (-1, -1)))
        assert_within_bounds(got, exact, sizes[2])


@only_pairs
@pytest.mark.parametrize(("sizes", "kwargs"), THREAD_CASES, ids=str)
def test_threads_do_not_change_a_bit_in_pairs(
    sizes: tuple[int, ...], kwargs: dict[str, Any]
) -> None:
    with running_on(PAIRS):
        threads_do_not_change_a_bit(torch.bfloat16, sizes, kwargs)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_feature_in_bfloat16(isa: str, case: Case) -> None:
    """In the norm, against float64: u for the result and u for P or dS, twice that for what cancels
    between a handful of terms."""
    leaves, kwargs = make(case, torch.bfloat16)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    wide_kwargs: dict[str, Any] = {
        name: wide[next(i for i, t in enumerate(leaves) if t is value)]
        if any(value is t for t in leaves)
        else value
        for name, value in kwargs.items()
    }
    q, k, v = leaves[:3]
    with running_on(isa):
        out, lse = flash_attn_func(q, k, v, **kwargs, return_lse=True)
        got = torch.autograd.grad(weigh(out, lse), leaves)
    exact_out, exact_lse = naive_attention(wide[0], wide[1], wide[2], **wide_kwargs)
    exact = torch.autograd.grad(weigh(exact_out, exact_lse), wide)
    u = 2.0**-9
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=100 * 2.0**-24)
    for actual, wanted in zip((out, *got), (exact_out, *exact), strict=True):
        error = (actual.detach().double() - wanted.detach()).norm()
        assert error <= 4 * u * wanted.detach().norm()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("spoiled", ["q", "k", "v", "dout"])
def test_what_is_hidden_reaches_nothing_in_bfloat16(isa: str, bad: float, spoiled: str) -> None:
    """Position 61 of 101 is bad, causal: what does not see it is as without it, but for the order
    of sums."""
    *leaves, dout = draw(1, 101, 101, 3, 1, 16, 24, dtype=torch.bfloat16)
    with running_on(isa):
        clean = run(tuple(leaves), dout, causal=True)
        inputs: dict[str, Tensor] = dict(zip(("q", "k", "v", "dout"), (*leaves, dout), strict=True))
        inputs[spoiled] = inputs[spoiled].clone()
        inputs[spoiled][0, 61] = bad
        got = run((inputs["q"], inputs["k"], inputs["v"]), inputs["dout"], causal=True)
    kept = [(got[0][:, :61], clean[0][:, :61]), (got[2][:, :61], clean[2][:, :61])]
    if spoiled in ("q", "dout"):  # one bad row: it sees the keys up to its own
        kept += [(got[i][:, 62:], clean[i][:, 62:]) for i in (2, 3, 4)]
    for actual, wanted in kept:
        size = float(wanted.abs().max())
        torch.testing.assert_close(actual, wanted, rtol=2.0**-7, atol=size * 2.0**-16)
    assert any(not tensor.isfinite().all() for tensor in got)


@only_pairs
def test_short_sequences_end_to_end_are_calls_of_their_own() -> None:
    """Sequences of up to 16 rows read keys in place, in float32; longer ones in pairs."""
    rows = [3, 17, 31, 48, 1, 16]
    ends = torch.tensor([0, *rows]).cumsum(0)
    *leaves, dout = draw(1, sum(rows), sum(rows), 2, 2, 32, 32, dtype=torch.bfloat16)
    q, k, v = (t[0].requires_grad_() for t in leaves)
    with running_on(PAIRS):
        out = flash_attn_varlen_func(q, k, v, ends, ends, max(rows), max(rows), causal=True)
        grads = torch.autograd.grad(out, (q, k, v), dout[0])
        for first, last in zip(ends.tolist(), ends[1:].tolist(), strict=False):
            part = slice(first, last)
            own = run((q[None, part], k[None, part], v[None, part]), dout[:, part], causal=True)
            for actual, wanted in zip((out, *grads), (own[0], *own[2:]), strict=True):
                assert_same_bits(actual[part].detach(), wanted[0])


@only_pairs
def test_factors_below_the_normal_numbers_count_as_zero() -> None:
    tiny = 2.0**-130
    v = torch.full((1, 64, 1, 16), tiny, dtype=torch.bfloat16)
    q = torch.randn(1, 64, 1, 16).bfloat16()
    assert (v.float() == tiny).all()
    with running_on(PAIRS):
        assert (flash_attn_func(q, q, v) == 0).all()
        # As scores they are 0 on any instruction set: every key weighs the same.
        out = flash_attn_func(torch.full_like(q, tiny), q, q)
    mean = q.double().mean(1, keepdim=True).expand_as(q)
    torch.testing.assert_close(out.double(), mean, rtol=2.0**-8, atol=2.0**-9)


@pytest.mark.parametrize("isa", ISAS)
def test_which_backend_names_the_body(isa: str) -> None:
    q = torch.zeros(1, 2, 1, 4)
    with running_on(isa):
        chosen = [which_backend(flash_attn_func, x, x, x).chosen for x in (q, q.bfloat16())]
    # Only products of bfloat16 have a body of their own there.
    assert chosen == [f"cpu:{'avx512' if isa == PAIRS else isa}", f"cpu:{isa}"]
