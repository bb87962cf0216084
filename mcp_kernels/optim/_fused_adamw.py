"""torch's fused AdamW with the factor of the gradients, from clipping and loss scale, folded in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fused_adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    moments: tuple[Sequence[Tensor], Sequence[Tensor]],
    counts: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    eps: float,
    factor: float,
) -> None:
    """One update of ``params`` from ``factor * grads``, in place; call without autograd.

    What ``torch.optim.AdamW(fused=True)`` comes down to, without its half a millisecond of Python.

    Args:
        params: float32 or float64, on one device.
        grads: like ``params``; they are scaled in place.
        moments: first and second, like ``params``.
        counts: float32 ``[]`` each, updates done, this one included.
        lr: learning rate.
        betas: decay of the first and the second moment.
        weight_decay: decoupled.
        eps: added to the root of the second moment.
        factor: of the gradients.

    Cost: one pass; a factor other than 1 costs one store more an element.
    """
    scale = None
    if factor != 1.0 and params:
        # The kernel divides by a float32 number, which is too coarse for float64 gradients.
        if params[0].dtype == torch.float64:
            torch._foreach_mul_(list(grads), factor)
        else:
            scale = torch.tensor(1 / factor, dtype=torch.float32, device=params[0].device)
    torch._fused_adamw_(
        list(params),
        list(grads),
        list(moments[0]),
        list(moments[1]),
        [],
        list(counts),
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=scale,
        found_inf=None,
    )
