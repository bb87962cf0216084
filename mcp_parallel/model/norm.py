"""Root-mean-square norm with its gradient as explicit formulas.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).

    r  = 1 / sqrt(mean(x^2) + eps)            one number a row
    y  = x r w
    p  = dy x                                 the one product that both gradients need
    dx = r dy w - x r^3 (p w) / D             the second term is r's dependence on x
    dw = p^T r

torch 2.13 runs ``rms_norm`` on CPU as a chain of elementwise ops, forward and backward; this keeps
one row of statistics instead of copies of x, and its sums over rows and features are matrix-vector
products: backward makes four elementwise passes, in two buffers' memory. Of 16-bit x and w the
arithmetic is fp32 throughout; y and the gradients are rounded once.
Letters: N = rows (all leading dims), D = features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcp_kernels.saved import keep_exact


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        dtype = x.dtype if x.itemsize >= 4 else torch.float32
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)  # [..., 1]
        scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        keep_exact(scale)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        x_dtype, weight_dtype = x.dtype, weight.dtype
        dy, x, weight = grads[0].to(scale.dtype), x.to(scale.dtype), weight.to(scale.dtype)
        d_weight = dx = None
        product = dy * x  # [..., D]
        rows, scale_N = product.flatten(0, -2), scale.flatten()
        if ctx.needs_input_grad[1]:
            d_weight = torch.mv(rows.t(), scale_N).to(weight_dtype)
        if ctx.needs_input_grad[0]:
            slope = torch.mv(rows, weight).div_(x.shape[-1])  # [N]
            for _ in range(3):  # one after the other: r^3 alone leaves float32 before x^2 does
                slope.mul_(scale_N)
            dx = torch.mul(dy, weight, out=product).mul_(scale)
            dx = dx.addcmul_(x, slope.view_as(scale), value=-1).to(x_dtype)
        return dx, d_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each row of ``x`` ``[..., D]`` divided by its root mean square, times ``weight`` ``[D]``."""
    return _RMSNorm.apply(x, weight, eps)  # pyright: ignore[reportReturnType]
