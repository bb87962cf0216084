"""``torch.autocast`` for the public functions: matmul-like ops run in the lower precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def under_autocast(*tensors: Tensor | None) -> Any:
    """The tensors as they are, or in autocast's dtype where it is on for their device.

    As in torch, float64 and what is not floating stay as they are. The casts are differentiable.
    """
    if not torch._C._is_any_autocast_enabled():
        return tensors
    first = tensors[0]
    if first is None or not torch.is_autocast_enabled(first.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(
        t if t is None or not t.is_floating_point() or t.dtype == torch.float64 else t.to(dtype)
        for t in tensors
    )
