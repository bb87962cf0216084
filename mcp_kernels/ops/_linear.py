"""``x @ weight.T + bias`` and its gradients as plain matmuls: what the parallel matmuls share.

Letters: M = rows (all leading dimensions together), K = in features, N = out features.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def check_linear(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Hold the arguments of a linear map against each other.

    Raises:
        ValueError: a shape does not fit.
        TypeError: the dtypes differ.
    """
    if x.dim() == 0 or weight.dim() != 2:
        raise ValueError(
            f"{op}: x must be [..., K] and weight [N, K], got {list(x.shape)} "
            f"and {list(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{op}: bias must be [{weight.shape[0]}], got {list(bias.shape)}")
    if x.dtype != weight.dtype or (bias is not None and bias.dtype != x.dtype):
        raise TypeError(
            f"{op}: x, weight and bias must have one dtype, got {x.dtype}, {weight.dtype}"
            f"{'' if bias is None else f', {bias.dtype}'}; cast them first"
        )


def check_features(op: str, in_features: int, weight: Tensor) -> None:
    """Hold ``in_features`` against the columns of ``weight``.

    Raises:
        ValueError: they differ.
    """
    if in_features != weight.shape[1]:
        raise ValueError(
            f"{op}: x must have {weight.shape[1]} features (weight is {list(weight.shape)}, "
            f"[out, in]), got {in_features}"
        )


def as_rows(x: Tensor) -> Tensor:
    """``[..., K]`` as ``[M, K]``; a size of 0 does not confuse it, as -1 would torch.

    Nor is a symbol among the sizes taken for the number it is now, as ``torch.Size.numel`` would.
    """
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x [..., K]`` times ``weight [N, K]`` transposed, contiguous ``[..., N]``."""
    rows = as_rows(x)
    out = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    if x.dim() == 2:
        return out
    # An op's result must not count as a view: in-place use of views is restricted under autograd.
    return torch.ops.aten._unsafe_view(out, [*x.shape[:-1], weight.shape[0]])


def linear_backward(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``linear`` for (x, weight, bias), each only where ``needs`` asks for it.

    ``x`` may be None where the weight needs no gradient, ``weight`` where x needs none.
    """
    dy_MN = as_rows(dy)
    dx = dw = db = None
    if needs[0] and weight is not None:
        # Under torch.vmap a product need not lie in one piece.
        dx = torch.mm(dy_MN, weight).reshape(*dy.shape[:-1], weight.shape[1])
    if needs[1] and x is not None:
        dw = torch.mm(dy_MN.t(), as_rows(x))
    if needs[2]:
        db = dy_MN.sum(0)
    return dx, dw, db
