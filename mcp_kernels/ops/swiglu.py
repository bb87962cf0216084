"""SwiGLU's gate.

    y      = silu(gate) up                  silu(g) = g sigma(g)
    d_up   = dy silu(gate)
    d_gate = dy up sigma(gate) (1 + gate (1 - sigma(gate)))

What is kept for backward is gate and up: silu(gate), which autograd would keep as well, is cheap to
make again. Of 16-bit tensors all arithmetic is float32, and each result is rounded once.

Source: Shazeer, "GLU Variants Improve Transformer" (2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from mcp_kernels._op import call, define_op
from mcp_kernels._transforms import Result, in_front
from mcp_kernels.ops._rows_check import check_floating, check_like, compute_dtype
from mcp_kernels.ops._second_gradients import second_gradients


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, elementwise; twice differentiable.

    Args:
        gate: ``[..., F]``, float64, float32, bfloat16 or float16, of any strides; halves of one
            packed tensor are read where they are.
        up: like ``gate``.

    Returns:
        A new tensor like ``gate``.

    Raises:
        TypeError: the dtype is none of these.
        ValueError: ``up`` is not like ``gate``.

    Cost: on CPU one pass over memory, 12 bytes an element in float32 (20 backward).
    """
    check_floating("swiglu", "gate", gate)
    if gate.dim() < 1:
        raise ValueError("swiglu: gate must have at least 1 dimension, got 0")
    check_like("swiglu", "up", up, "gate", gate)
    return torch.ops.mcp_kernels.swiglu(gate, up)


def _formula(gate: Tensor, up: Tensor) -> Tensor:
    """In operations that autograd knows."""
    dtype = compute_dtype(gate)
    return (silu(gate.to(dtype)) * up.to(dtype)).to(gate.dtype)


def _swiglu_ref(gate: Tensor, up: Tensor) -> Tensor:
    dtype = compute_dtype(gate)
    return silu(gate.to(dtype)).mul_(up).to(gate.dtype).contiguous()


def _swiglu_fake(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


def _swiglu_setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    gate, up = ctx.saved_tensors
    return call(torch.ops.mcp_kernels.swiglu_bwd.default, dy, gate, up)


def _bwd_ref(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(gate)
    wide_dy, wide_gate = dy.to(dtype), gate.to(dtype)
    dgate = torch.ops.aten.silu_backward.default(wide_dy * up, wide_gate)
    dup = silu(wide_gate).mul_(wide_dy)
    return dgate.to(gate.dtype).contiguous(), dup.to(up.dtype).contiguous()


def _bwd_fake(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _bwd_setup(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def _bwd_backward(
    ctx: Any, d_dgate: Tensor | None, d_dup: Tensor | None
) -> tuple[Tensor | None, ...]:
    dy, gate, up = ctx.saved_tensors
    [d_dy], [d_gate, d_up] = second_gradients(_formula, [gate, up], [dy], [d_dgate, d_dup])
    return d_dy, d_gate, d_up


def _vmap(info: Any, in_dims: Sequence[int | None], *args: Tensor) -> Result:
    pair = [in_front(t, dim, info.batch_size) for t, dim in zip(args, in_dims, strict=True)]
    return torch.ops.mcp_kernels.swiglu(*pair), 0


def _bwd_vmap(info: Any, in_dims: Sequence[int | None], *args: Tensor) -> Result:
    three = [in_front(t, dim, info.batch_size) for t, dim in zip(args, in_dims, strict=True)]
    return torch.ops.mcp_kernels.swiglu_bwd(*three), (0, 0)


define_op(
    "swiglu(Tensor gate, Tensor up) -> Tensor",
    reference=_swiglu_ref,
    fake=_swiglu_fake,
    backward=_swiglu_backward,
    setup_context=_swiglu_setup,
    vmap=_vmap,
)
define_op(
    "swiglu_bwd(Tensor dy, Tensor gate, Tensor up) -> (Tensor dgate, Tensor dup)",
    reference=_bwd_ref,
    fake=_bwd_fake,
    backward=_bwd_backward,
    setup_context=_bwd_setup,
    vmap=_bwd_vmap,
)
