"""Root-mean-square norm over the last dimension, alone or after the addition before it.

    s  = x + residual                      rounded to x's dtype; x itself without a residual
    r  = 1 / sqrt(mean(s^2) + eps)         one number a row
    y  = s r w
    p  = sum(dy w s) r^3 / D               of a row: the projection that the norm takes out
    ds = r dy w - s p + dsum               dsum: the gradient of s from elsewhere
    dw = sum over rows of dy s r

Both add_rms_norm and rms_norm of its sum give the same bits. Of 16-bit tensors all arithmetic is
float32, and each result is rounded once. What is kept for backward is s, w and r.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
Letters: N = rows (all leading dims), D = features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcp_kernels._op import call, define_op
from mcp_kernels._transforms import Result, in_front, loop
from mcp_kernels.ops._rows_check import DTYPES, check_floating, check_like, compute_dtype
from mcp_kernels.ops._second_gradients import second_gradients
from mcp_kernels.saved import keep_exact


def rms_norm(x: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
    """Each row of ``x`` over its root mean square, times ``weight``; twice differentiable.

    Args:
        x: ``[..., D]``, float64, float32, bfloat16 or float16, of any strides.
        weight: ``[D]``, of x's dtype or float32.
        eps: added to the mean square; None is 1e-5 (in torch's rms_norm the dtype's epsilon).

    Returns:
        A new tensor like ``x``.

    Raises:
        TypeError: a dtype is none of these.
        ValueError: ``weight`` does not fit ``x``.

    Cost: on CPU one pass over memory, 8 bytes an element in float32 (12 backward).
    """
    _check("rms_norm", x, weight)
    # No default of the argument: torch.compile, where all is dynamic, makes a symbol of any float
    # from outside of a function's text, and begins a second graph when the op wants its value.
    return torch.ops.mcp_kernels.rms_norm(x, weight, 1e-5 if eps is None else eps)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float | None = None
) -> tuple[Tensor, Tensor]:
    """``rms_norm`` of ``x + residual``, and that sum; twice differentiable.

    Args:
        x: ``[..., D]``, as in ``rms_norm``.
        residual: like ``x``.
        weight: ``[D]``, of x's dtype or float32.
        eps: added to the mean square; None is 1e-5 (in torch's rms_norm the dtype's epsilon).

    Returns:
        ``(y, x + residual)``, two new tensors like ``x``.

    Raises:
        TypeError: a dtype is none of these.
        ValueError: ``weight`` or ``residual`` does not fit ``x``.

    Cost: one pass, 16 bytes an element in float32 where an addition and a norm take 20; backward
    16 where they take 24.
    """
    _check("add_rms_norm", x, weight)
    check_like("add_rms_norm", "residual", residual, "x", x)
    eps = 1e-5 if eps is None else eps  # as in rms_norm
    y, total, _ = torch.ops.mcp_kernels.add_rms_norm(x, residual, weight, eps)
    return y, total


def _check(op: str, x: Tensor, weight: Tensor) -> None:
    check_floating(op, "x", x)
    if x.dim() < 1 or x.shape[-1] < 1 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: weight must be [D] for x [..., D] with D >= 1, got {list(weight.shape)} for "
            f"{list(x.shape)}"
        )
    if weight.dtype not in DTYPES or weight.dtype not in (x.dtype, torch.float32):
        raise TypeError(
            f"{op}: weight must be float32 or {x.dtype} as x is, got {weight.dtype}; cast it"
        )


def _formula(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``y`` and ``scale``, in operations that autograd knows."""
    wide = x.to(compute_dtype(x))
    scale = (wide.square().mean(-1) + eps).rsqrt()  # [...]
    return (wide * scale[..., None] * weight.to(wide.dtype)).to(x.dtype), scale


def _norm_ref(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(x)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)  # [..., 1]
    scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    y = (x * scale).mul_(weight.to(dtype)).to(x.dtype).contiguous()
    return y, scale.squeeze(-1).contiguous()


def _norm_fake(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=compute_dtype(x))


def _norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, ctx.eps = inputs
    _keep(ctx, x, weight, output[1])


def _keep(ctx: Any, s: Tensor, weight: Tensor, scale: Tensor) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(scale)
    keep_exact(scale)
    ctx.save_for_backward(s, weight, scale)


def _norm_backward(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    dx, dweight = _through_norm(ctx, dy, None)
    needs = ctx.needs_input_grad
    return dx if needs[0] else None, dweight if needs[1] else None, None


def _through_norm(ctx: Any, dy: Tensor | None, dsum: Tensor | None) -> tuple[Any, Any]:
    if dy is None:
        return dsum, None
    s, weight, scale = ctx.saved_tensors
    op = torch.ops.mcp_kernels.rms_norm_bwd.default
    return call(op, dy, dsum, s, weight, scale, ctx.eps)


def _add_norm_ref(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = (x + residual).contiguous()
    y, scale = _norm_ref(total, weight, eps)
    return y, total, scale


def _add_norm_fake(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    y, scale = _norm_fake(x, weight, eps)
    return y, x.new_empty(x.shape), scale


def _add_norm_setup(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    _, _, weight, ctx.eps = inputs
    _keep(ctx, output[1], weight, output[2])


def _add_norm_backward(
    ctx: Any, dy: Tensor | None, dsum: Tensor | None, _: Any
) -> tuple[Tensor | None, ...]:
    ds, dweight = _through_norm(ctx, dy, dsum)
    needs = ctx.needs_input_grad
    return ds if needs[0] else None, ds if needs[1] else None, dweight if needs[2] else None, None


def _norm_bwd_ref(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    dtype = scale.dtype
    wide, wide_dy, w = x.to(dtype), dy.to(dtype), weight.to(dtype)
    product = wide_dy * wide  # [..., D]: what both gradients need
    rows, scale_N = product.flatten(0, -2) if x.dim() > 1 else product[None], scale.flatten()
    dweight = torch.mv(rows.t(), scale_N).to(weight.dtype)
    slope = torch.mv(rows, w).div_(x.shape[-1])  # [N]
    for _ in range(3):  # one after the other: r^3 alone leaves float32 before x^2 does
        slope.mul_(scale_N)
    column = (*scale.shape, 1)
    dx = torch.mul(wide_dy, w, out=product).mul_(scale.view(column))
    dx.addcmul_(wide, slope.view(column), value=-1)
    if dsum is not None:
        dx.add_(dsum)
    return dx.to(x.dtype).contiguous(), dweight


def _norm_bwd_fake(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _norm_bwd_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    dy, dsum, x, weight, _, ctx.eps = inputs
    ctx.has_dsum = dsum is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dy, x, weight)


def _norm_bwd_backward(
    ctx: Any, d_dx: Tensor | None, d_dweight: Tensor | None
) -> tuple[Tensor | None, ...]:
    dy, x, weight = ctx.saved_tensors
    eps = ctx.eps
    [d_dy], [d_x, d_weight] = second_gradients(
        lambda x, w: _formula(x, w, eps)[0], [x, weight], [dy], [d_dx, d_dweight]
    )
    return d_dy, d_dx if ctx.has_dsum else None, d_x, d_weight, None, None


def _norm_vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> Result:
    x, weight, eps = args
    if in_dims[1] is not None:
        return loop(torch.ops.mcp_kernels.rms_norm, info, in_dims, args)
    x = in_front(x, in_dims[0], info.batch_size)
    return torch.ops.mcp_kernels.rms_norm(x, weight, eps), (0, 0)


def _add_norm_vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> Result:
    x, residual, weight, eps = args
    if in_dims[2] is not None:
        return loop(torch.ops.mcp_kernels.add_rms_norm, info, in_dims, args)
    pair = [in_front(t, d, info.batch_size) for t, d in zip((x, residual), in_dims, strict=False)]
    return torch.ops.mcp_kernels.add_rms_norm(*pair, weight, eps), (0, 0, 0)


def _norm_bwd_vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> Result:
    # Each sample has a gradient of the weight of its own.
    return loop(torch.ops.mcp_kernels.rms_norm_bwd, info, in_dims, args)


define_op(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor y, Tensor scale)",
    reference=_norm_ref,
    fake=_norm_fake,
    backward=_norm_backward,
    setup_context=_norm_setup,
    vmap=_norm_vmap,
)
define_op(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps)"
    " -> (Tensor y, Tensor sum, Tensor scale)",
    reference=_add_norm_ref,
    fake=_add_norm_fake,
    backward=_add_norm_backward,
    setup_context=_add_norm_setup,
    vmap=_add_norm_vmap,
)
define_op(
    "rms_norm_bwd(Tensor dy, Tensor? dsum, Tensor x, Tensor weight, Tensor scale, float eps)"
    " -> (Tensor dx, Tensor dweight)",
    reference=_norm_bwd_ref,
    fake=_norm_bwd_fake,
    backward=_norm_bwd_backward,
    setup_context=_norm_bwd_setup,
    vmap=_norm_bwd_vmap,
)
