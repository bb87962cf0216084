"""How far 16- and 32-bit attention may be from float64 on the same rounded inputs.

Forward, elementwise. With P the exact probabilities and u the unit roundoff of float32, a score is
a sum of D products, so it is off by ds = sqrt(D) u |scale| (|q| |k|); a probability is off by the
factor exp(2 ds) - 1 (numerator and sum), and the product with v is a sum of Sk terms. Hence
    |out - exact| <= u_out |exact| + (2 max ds + (sqrt(Sk) + 8) u) (P |v|)
with u_out the roundoff of the output type: one rounding at the end. The 8 are the roundings of
scale, exponent, sum and division.

Gradients, as a norm. Each is a sum of products of float32 results, rounded once at the end, so its
relative error in the norm is held to 1.5 times that of the exact gradient rounded once to
16 bits, and to a few hundred u for float32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_attention import Case, make
from torch import Tensor

from mcp_kernels import flash_attn_func

SHAPES = [(2, 65, 65, 4, 2, 16, 16), (1, 200, 333, 2, 2, 64, 64), (1, 3, 1000, 2, 1, 7, 9)]
KWARGS = [{}, {"causal": True}, {"window_size": (40, 10)}]


def _exact(leaves: list[Tensor], kwargs: dict[str, Any], dout: Tensor) -> list[Tensor]:
    wide = [t.detach().double().requires_grad_() for t in leaves]
    q, k, v = wide
    out, lse, p = flash_attn_func(q, k, v, **kwargs, return_attn_probs=True)
    group = q.shape[2] // k.shape[2]
    magnitude = torch.einsum("bhij,bjhe->bihe", p, v.detach().abs().repeat_interleave(group, dim=2))
    return [out.detach(), lse, magnitude, *torch.autograd.grad(out, wide, dout.double())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("kwargs", KWARGS, ids=str)
def test_forward_and_backward(
    dtype: torch.dtype, sizes: tuple[int, ...], kwargs: dict[str, Any]
) -> None:
    leaves, kwargs = make(Case("precision", sizes=sizes, kwargs=kwargs), dtype)
    q, k, v = leaves
    out, lse = flash_attn_func(q, k, v, **kwargs, return_lse=True)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact, exact_lse, magnitude, *exact_grads = _exact(leaves, kwargs, dout)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32

    u, u_out = 2.0**-24, torch.finfo(dtype).eps / 2
    _, _, keys, heads, kv_heads, dim, _ = sizes
    wide_k = k.detach().double().abs().repeat_interleave(heads // kv_heads, dim=2)
    products = torch.einsum("bihd,bjhd->bhij", q.detach().double().abs(), wide_k) * dim**-0.5
    ds = dim**0.5 * u * float(products.max())
    bound = u_out * exact.abs() + (2 * ds + (keys**0.5 + 8) * u) * magnitude
    assert ((out.double() - exact).abs() <= bound).all()
    assert ((lse.double() - exact_lse).abs() <= ds + 8 * u * (1 + exact_lse.abs())).all()

    grads = torch.autograd.grad(out, leaves, dout)
    for grad, wanted in zip(grads, exact_grads, strict=True):
        assert grad.dtype == dtype
        once = float((wanted.to(dtype).double() - wanted).norm() / wanted.norm())
        error = float((grad.double() - wanted).norm() / wanted.norm())
        allowed = 300 * u if dtype == torch.float32 else 1.5 * once
        assert error <= allowed, (error, once)


def test_lowest_precision_accumulates_in_float32() -> None:
    """4096 equal keys: a bfloat16 sum would stop at 256."""
    q = torch.zeros(1, 1, 1, 4, dtype=torch.bfloat16)
    k = torch.zeros(1, 4096, 1, 4, dtype=torch.bfloat16)
    v = torch.ones(1, 4096, 1, 4, dtype=torch.bfloat16)
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    assert (out == 1).all()
    torch.testing.assert_close(lse, torch.full_like(lse, 4096.0).log())
