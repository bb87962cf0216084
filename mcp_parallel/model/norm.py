"""Root-mean-square norm with its gradient as explicit formulas.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).

    r  = 1 / sqrt(mean(x^2) + eps)            one number a row
    y  = x r w
    dx = r (g - x r^2 mean(g x)),  g = dy w   the second term is r's dependence on x
    dw = sum over rows of dy x r

torch 2.13 runs ``rms_norm`` on CPU as a chain of elementwise ops, forward and backward; this is
half as many passes over the activations and keeps one row of statistics instead of copies of x.
Letters: N = rows (all leading dims), D = features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # [..., 1]
        scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        dy = grads[0]
        d_weight = dx = None
        normed = x * scale  # [..., D]
        product = dy * normed
        if ctx.needs_input_grad[1]:
            d_weight = product.flatten(0, -2).sum(0)
        if ctx.needs_input_grad[0]:
            # mean(g x) r = (dy x r) . w / D: a matrix-vector product, not one more pass.
            mean = torch.mv(product.flatten(0, -2), weight).div_(x.shape[-1])
            mean = mean.view_as(scale)
            dx = (dy * weight).addcmul_(normed, mean, value=-1).mul_(scale)
        return dx, d_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each row of ``x`` ``[..., D]`` divided by its root mean square, times ``weight`` ``[D]``."""
    return _RMSNorm.apply(x, weight, eps)  # pyright: ignore[reportReturnType]
