"""Calls that the Triton attention kernels leave to the reference, and why. Triton is not imported.

One function for each place where the op's schema has q and v.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MAX_HEAD_DIM = 256
"""A program holds whole rows of its tile: more columns than this do not fit its registers."""


def refuses(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> str | None:
    """Why a forward or a cached call is refused, in words; None where it is taken."""
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"needs float32, bfloat16 or float16, got {q.dtype}"
    widest = max(q.shape[-1], v.shape[-1])
    if widest > MAX_HEAD_DIM:
        return f"needs head dims up to {MAX_HEAD_DIM}, got {widest}"
    return None


def refuses_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any
) -> str | None:
    """Why a backward call is refused, in words; None where it is taken."""
    return refuses(q, k, v)
