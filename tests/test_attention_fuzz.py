"""Any legal call: the body that runs here against the reference in float64, by hypothesis.

16-bit results may be one unit in the last place of the largest exact value away (they are rounded
once). For float32 and float64 the factor is 1000 unit roundoffs: logits reach about 40, so a score
is off by 40 u at worst, and so is the exponent's relative error; gradients chain three such sums.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mcp_kernels import flash_attn_func, reference_only

SIZES = [0, 1, 2, 3, 17, 48, 64, 65, 129, 200]
DIMS = [1, 3, 8, 16, 32, 40, 59, 64, 80, 96, 111, 128]
FACTOR = {torch.bfloat16: 1, torch.float16: 1, torch.float32: 1000, torch.float64: 1000}
LAYOUTS = ["plain", "heads first", "offset", "every second", "one head for all"]


def laid_out(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Tensor:
    b, s, h, d = shape
    if layout == "heads first":
        return torch.randn(b, h, s, d).to(dtype).transpose(1, 2)
    if layout == "offset":
        return torch.randn(b, s, h, d + 3).to(dtype)[..., 2 : 2 + d]
    if layout == "every second":
        return torch.randn(b, s, h, 2 * d).to(dtype)[..., ::2]
    if layout == "one head for all":
        return torch.randn(b, s, 1, d).to(dtype).expand(shape)
    return torch.randn(shape).to(dtype)


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[Tensor], dict[str, Any], torch.dtype]:
    torch.manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from(list(FACTOR)))
    batch, kv_heads = draw(st.sampled_from([0, 1, 2, 3])), draw(st.sampled_from([1, 2, 3, 5]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4, 13]))
    rows, keys = draw(st.sampled_from(SIZES)), draw(st.sampled_from(SIZES))
    dim, value_dim = draw(st.sampled_from(DIMS)), draw(st.sampled_from(DIMS))
    shapes = (batch, rows, heads, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads)
    qkv = [
        laid_out(shape, draw(st.sampled_from(LAYOUTS)), dtype)
        for shape in (*shapes[:2], (*shapes[2], value_dim))
    ]
    options: dict[str, Any] = {
        "causal": draw(st.booleans()),
        "causal_align": draw(st.sampled_from(["bottom_right", "top_left"])),
    }
    limit = st.sampled_from([-1, 0, 1, 5, 40])
    optional = {
        "window_size": st.tuples(limit, limit),
        "softcap": st.sampled_from([2.0, 30.0]),
        "softmax_scale": st.sampled_from([0.0, -0.3, 0.2]),
        "dropout_p": st.sampled_from([0.1, 0.5, 1.0]),
        "alibi_slopes": st.sampled_from([(heads,), (batch, heads)]).map(torch.rand),
        "sink": st.just((heads,)).map(torch.randn),
        "bias": st.tuples(*(st.sampled_from([1, size]) for size in (batch, heads, rows, keys))).map(
            lambda shape: torch.randn(shape).to(dtype)
        ),
    }
    for name in draw(st.sets(st.sampled_from(sorted(optional)), max_size=3)):
        options[name] = draw(optional[name])
    if "bias" in options and draw(st.booleans()):
        options["bias"] = options["bias"] > -0.5
    return qkv, options, dtype


def run(
    qkv: list[Tensor], options: dict[str, Any], *, wide: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    def leaf(tensor: Tensor) -> Tensor:
        return (tensor.double() if wide else tensor).detach().requires_grad_()

    leaves = [leaf(tensor) for tensor in qkv]
    options = dict(options)
    for name in ("sink", "bias"):
        if name in options and options[name].is_floating_point():
            options[name] = leaf(options[name])
            leaves.append(options[name])
    torch.manual_seed(7)  # of the dropout mask
    out, lse = flash_attn_func(*leaves[:3], return_lse=True, **options)
    return out, lse, leaves


@settings(max_examples=150, deadline=None)
@given(calls())
def test_any_call(call: tuple[list[Tensor], dict[str, Any], torch.dtype]) -> None:
    qkv, options, dtype = call
    out, lse, leaves = run(qkv, options, wide=False)
    dout = torch.randn(out.shape).to(dtype)
    seen = lse.isfinite()
    dlse = torch.randn(lse.shape) * seen
    grads = torch.autograd.grad((out, lse.masked_fill(~seen, 0)), leaves, (dout, dlse.to(lse)))
    with reference_only():
        exact_out, exact_lse, wide_leaves = run(qkv, options, wide=True)
        assert torch.equal(exact_lse.isfinite(), seen)
        exact_grads = torch.autograd.grad(
            (exact_out, exact_lse.masked_fill(~seen, 0)),
            wide_leaves,
            (dout.double(), dlse.double()),
        )
    assert out.dtype == dtype
    assert (lse[~seen] == -torch.inf).all()
    for got, want in ((out, exact_out), *zip(grads, exact_grads, strict=True)):
        assert got.isfinite().all()
        if got.numel():
            # Rounding noise of sums that cancel to zero is as large as their terms, about 1.
            eps = max(FACTOR[t] * torch.finfo(t).eps for t in (dtype, got.dtype))
            allowed = eps * max(want.abs().max().item(), 1e-2)
            assert (got.double() - want).abs().max() <= allowed
    wide = torch.finfo(lse.dtype).eps
    error = (lse.double() - exact_lse)[seen].abs()
    assert (error <= 100 * wide * (1 + exact_lse[seen].abs())).all()
