"""Rotary position embedding, half-rotation form (Su et al., "RoFormer", 2021).

Dimension j of the first half of a head is paired with dimension j of the second half and the pair
is turned by the angle ``position * theta ** (-2 j / K)``. 16-bit heads are turned in fp32 and
rounded once: angles in 16 bits would be off by whole turns at long positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

# Rows of half a head of so few features are too short for vector loops: heads up to this size are
# turned as whole rows against tables for every head, 1.6 to 5 times as fast. Wider heads are not:
# the copy with halves exchanged costs them more than the short rows did.
NARROW_HEAD = 32


Chunks = tuple[tuple[int, int], ...]
"""(first, past the last) position of each chunk of rows, one chunk after the other."""


@lru_cache(maxsize=16)
def _table(
    chunks: Chunks, head_size: int, theta: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[S, 1, K / 2]``; angles in float64, rounded once."""
    with torch.no_grad(), torch.inference_mode(mode=False):
        exponent = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
        positions = torch.cat([torch.arange(*chunk, dtype=torch.float64) for chunk in chunks])
        angle = torch.outer(positions, theta**-exponent)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        return cos.to(device, dtype), sin.to(device, dtype)


@lru_cache(maxsize=16)
def _spread_table(
    chunks: Chunks,
    heads: int,
    head_size: int,
    theta: float,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine ``[S, H, K]``: what each element and its partner are multiplied by."""
    with torch.no_grad(), torch.inference_mode(mode=False):
        cos, sin = _table(chunks, head_size, theta, device, dtype)
        cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        return cos.repeat(1, heads, 1), sin.repeat(1, heads, 1)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    return _turn_wide(x.to(cos.dtype), cos, sin, sign).to(x.dtype)


def _turn_wide(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    if cos.shape[-1] == x.shape[-1]:  # spread tables
        return (x * cos).addcmul_(torch.cat([second, first], -1), sin, value=sign)
    out = torch.empty_like(x)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)
    return out


class _Rotate(torch.autograd.Function):
    """A rotation's transpose is the rotation back, so backward needs no saved activation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.tables = cos, sin  # they live in the cache: nothing for autograd to keep
        return _turn(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.tables
        return _turn(grads[0], cos, sin, -1.0), None, None


def rotate(x: Tensor, theta: float, start: int | Sequence[int] = 0) -> Tensor:
    """Turn each pair of ``x`` ``[B, S, H, K]`` by its position's angle.

    Args:
        x: queries or keys; K must be even (held by the config check).
        theta: base of the geometric series of wavelengths.
        start: position of ``x[:, 0]``; or, where the rows are equal chunks from several places of
            a sequence, that of each chunk's first row.

    Returns:
        A new tensor like ``x``.
    """
    starts = (start,) if isinstance(start, int) else tuple(start)
    each = x.shape[1] // len(starts)
    # One table for all starts of whole sequences: those that grow token by token share it.
    skipped = starts[0] if len(starts) == 1 else 0
    chunks = tuple((first - skipped, first + each) for first in starts)
    heads, size = x.shape[-2:]
    dtype = x.dtype if x.itemsize >= 4 else torch.float32
    if size <= NARROW_HEAD:
        cos, sin = _spread_table(chunks, heads, size, theta, x.device, dtype)
    else:
        cos, sin = _table(chunks, size, theta, x.device, dtype)
    return _Rotate.apply(x, cos[skipped:], sin[skipped:])  # pyright: ignore[reportReturnType]
