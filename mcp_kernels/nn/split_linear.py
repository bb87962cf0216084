"""A linear map whose weight gradient can be put off (see ``deferred_weight_gradients``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mcp_kernels._transforms import are_active
from mcp_kernels.ops._autocast import under_autocast
from mcp_kernels.ops._deferred import WeightGradients, deferred_weight_gradients, deferring
from mcp_kernels.ops._linear import as_rows, linear, linear_backward

__all__ = [
    "SplitLinear",
    "WeightGradients",
    "deferred_weight_gradients",
    "split_linear",
    "split_linears",
]


class _SplitLinear(torch.autograd.Function):
    """dx = dy @ W now; dW = dy^T @ x now or later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (dy,), (x, weight) = grads, ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad
        later = deferring()
        if later is not None and needs_dw:
            later.add([ctx.weight], lambda: [torch.mm(as_rows(dy).t(), as_rows(x))])
            needs_dw = False
        return linear_backward(dy, x, weight, (needs_dx, needs_dw, needs_db))


def split_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear`` that knows ``deferred_weight_gradients``."""
    if torch.compiler.is_compiling() or are_active() or not torch.is_grad_enabled():
        return nn.functional.linear(x, weight, bias)
    x, weight, bias = under_autocast(x, weight, bias)
    return _SplitLinear.apply(x, weight, bias)  # pyright: ignore[reportReturnType]


class SplitLinear(nn.Linear):
    """``nn.Linear`` on ``split_linear``.

    Cost: that of ``nn.Linear``, and about 10 us of Python for forward and backward.
    """

    @classmethod
    def from_linear(cls, layer: nn.Linear) -> SplitLinear:
        """A layer with the parameters of ``layer`` themselves, which stays as it is."""
        made = cls.__new__(cls)
        nn.Linear.__init__(made, layer.in_features, layer.out_features, bias=False, device="meta")
        made.weight, made.bias = layer.weight, layer.bias
        return made

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """``[..., in_features]`` to ``[..., out_features]``."""
        return split_linear(input, self.weight, self.bias)


def split_linears(model: nn.Module) -> None:
    """Replace every plain ``nn.Linear`` in ``model`` by a ``SplitLinear`` of its parameters."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, name, SplitLinear.from_linear(child))
