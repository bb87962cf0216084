"""SwiGLU's gate with its gradient as explicit formulas (Shazeer, "GLU variants", 2020).

    y       = silu(gate) * up
    d_up    = dy * silu(gate)
    d_gate  = dy * up * silu'(gate)

Autograd would keep silu(gate) too; it is cheap to make again, and a sixth of a block's activations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dy = grads[0]
        d_gate = torch.ops.aten.silu_backward.default(dy * up, gate)
        return d_gate, silu(gate).mul_(dy)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, elementwise; both ``[..., F]``."""
    return _SwiGLU.apply(gate, up)  # pyright: ignore[reportReturnType]
