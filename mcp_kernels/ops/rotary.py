"""Rotary position embedding of some positions, from tables of cosines and sines.

Source: Su et al., "RoFormer" (2021), section 3.4.2.
Letters: B = batch, S = rows, H = heads, D = head dim, R = rotated dims.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: range, is_interleaved: bool) -> Tensor:
    """``x`` with its first R dims rotated by the angles of ``positions``.

    Args:
        x: ``[B, S, H, D]``.
        cos: ``[P, R / 2]``, cosine of each pair's angle at each position.
        sin: ``[P, R / 2]``.
        positions: of the S rows, or one position for all of them.
        is_interleaved: pairs are (0, 1), (2, 3), ..; else (0, R / 2), (1, R / 2 + 1), ..

    Returns:
        A new tensor of x's shape and dtype, computed in float32 (float64 for float64).

    Raises:
        ValueError: a position is past the table.
    """
    if positions.stop > cos.shape[0]:
        raise ValueError(
            f"rotate: rotary_cos must have {positions.stop} positions, got {cos.shape[0]}"
        )
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    at = slice(positions.start, positions.stop)
    cos_S1P, sin_S1P = (t[at, None].to(dtype) for t in (cos, sin))
    rotated_dims = 2 * cos.shape[1]
    head = x[..., :rotated_dims].to(dtype)
    if is_interleaved:
        first, second = head[..., 0::2], head[..., 1::2]
    else:
        first, second = head.chunk(2, dim=-1)
    turned = (
        first * cos_S1P - second * sin_S1P,
        first * sin_S1P + second * cos_S1P,
    )
    if is_interleaved:
        joined = torch.stack(turned, dim=-1).flatten(-2)
    else:
        joined = torch.cat(turned, dim=-1)
    return torch.cat([joined.to(x.dtype), x[..., rotated_dims:]], dim=-1)
