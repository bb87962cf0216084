"""Gradients of attention beyond the first: gradcheck, gradgradcheck, opcheck, needed ones only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_attention import Case, make
from torch import Tensor

from mcp_kernels import flash_attn_func, reference_only
from mcp_kernels.ops.attention_check import make_rng

SMALL = (1, 3, 4, 2, 1, 2, 3)
CASES = [
    Case("plain", sizes=SMALL),
    Case("dead_rows", sizes=(1, 4, 3, 2, 2, 2, 2), kwargs={"causal": True}),
    Case("sink_dead_rows", sizes=(1, 4, 2, 2, 1, 2, 2), kwargs={"causal": True}, has_sink=True),
    Case(
        "all",
        sizes=SMALL,
        bias=(2, 3, 4),
        alibi=(2,),
        has_sink=True,
        kwargs={"softcap": 1.1, "window_size": (1, 1)},
    ),
]


def _call(case: Case) -> tuple[Any, list[Tensor]]:
    """(function of the leaves giving out and lse where it is finite, leaves)."""
    leaves, kwargs = make(case)

    def run(*args: Tensor) -> tuple[Tensor, Tensor]:
        given = dict(kwargs)
        given |= dict(zip([n for n in ("bias", "sink") if n in given], args[3:], strict=True))
        q, k, v = args[:3]
        out, lse = flash_attn_func(q, k, v, **given, return_lse=True)
        return out, lse.masked_fill(lse == -float("inf"), 0.0)

    return run, leaves


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradcheck(case: Case) -> None:
    run, leaves = _call(case)
    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


def test_gradcheck_with_dropout() -> None:
    """The mask is a function of the seed alone, so the function is smooth under it."""
    (q, k, v), _ = make(Case("dropout", sizes=SMALL))
    rng = torch.tensor([5, 0])

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = (0.5, -1, 0, False, 0.0, 0.4)
        return torch.ops.mcp_kernels.flash_attn(q, k, v, None, None, None, rng, *options)[0]

    assert torch.autograd.gradcheck(run, (q, k, v))
    assert torch.autograd.gradgradcheck(run, (q, k, v))


def test_one_tensor_as_q_k_and_v() -> None:
    x = torch.randn(1, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda t: flash_attn_func(t, t, t, causal=True), (x,))


@pytest.mark.parametrize("needed", range(3))
def test_one_needed_gradient(needed: int) -> None:
    leaves, kwargs = make(Case("needed", kwargs={"causal": True}))
    q, k, v = leaves
    expected = torch.autograd.grad(flash_attn_func(q, k, v, **kwargs).sum(), leaves)[needed]
    fixed = [t.detach().requires_grad_(i == needed) for i, t in enumerate(leaves)]
    q, k, v = fixed
    flash_attn_func(q, k, v, **kwargs).sum().backward()
    assert [t.grad is not None for t in fixed] == [i == needed for i in range(3)]
    assert torch.equal(fixed[needed].grad, expected)  # pyright: ignore[reportArgumentType]


def test_no_grad_saves_nothing() -> None:
    leaves, _ = make(Case("no_grad"))
    q, k, v = leaves
    with torch.no_grad():
        assert flash_attn_func(q, k, v).grad_fn is None
    with torch.inference_mode():
        assert flash_attn_func(q, k, v).is_inference()


def test_gradient_of_out_that_is_expanded() -> None:
    """sum() sends a gradient with stride 0."""
    leaves, _ = make(Case("expanded"))
    q, k, v = leaves
    out = flash_attn_func(q, k, v)
    expanded = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    full = torch.autograd.grad(out, leaves, torch.ones_like(out))
    for actual, wanted in zip(expanded, full, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_opcheck(case: Case, dropout_p: float) -> None:
    leaves, kwargs = make(case)
    left, right = kwargs.get("window_size", (-1, -1))
    options = (0.7, left, 0 if kwargs.get("causal") else right, False, 1.1, dropout_p)
    slopes = None if case.alibi is None else kwargs["alibi_slopes"].view(1, -1)
    bias = None if case.bias is None else kwargs["bias"].detach()[None].requires_grad_()
    rng = make_rng("flash_attn", dropout_p, torch.device("cpu"))
    args = (*leaves[:3], bias, slopes, kwargs.get("sink"), rng, *options)
    ops = torch.ops.mcp_kernels
    torch.library.opcheck(ops.flash_attn.default, args)
    out, lse = ops.flash_attn(*args)
    grads = (torch.randn_like(out), torch.randn_like(lse))
    detached = [t.detach() if isinstance(t, Tensor) else t for t in args]
    backward_args = (*grads, *detached[:3], out.detach(), lse.detach(), *detached[3:7])
    backward_args = (*backward_args, bias is not None, *options)
    torch.library.opcheck(ops.flash_attn_bwd.default, backward_args)


def test_reference_only_gives_the_same_bits() -> None:
    leaves, _ = make(Case("reference"), torch.float32)
    q, k, v = (t.detach() for t in leaves)
    with reference_only():
        expected = flash_attn_func(q, k, v, causal=True)
    torch.testing.assert_close(flash_attn_func(q, k, v, causal=True), expected)


@pytest.mark.slow
def test_compiles_as_one_graph() -> None:
    leaves, _ = make(Case("compile"))
    q, k, v = leaves
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    out = compiled(q, k, v, causal=True)
    expected = flash_attn_func(q, k, v, causal=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(expected.sum(), leaves)
    )
