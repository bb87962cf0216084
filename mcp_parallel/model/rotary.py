"""Rotary position embedding of queries and keys (Su et al., "RoFormer", 2021).

Dimension j of the first half of a head is paired with dimension j of the second half and the pair
is turned by the angle ``position * theta ** (-2 j / K)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from mcp_kernels import rotary

Chunks = tuple[tuple[int, int], ...]
"""(first, past the last) position of each chunk of rows, one chunk after the other."""


@lru_cache(maxsize=16)
def _table(
    chunks: Chunks, head_size: int, theta: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[S, K / 2]``; angles in float64, rounded once."""
    with torch.no_grad(), torch.inference_mode(mode=False):
        exponent = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
        positions = torch.cat([torch.arange(*chunk, dtype=torch.float64) for chunk in chunks])
        angle = torch.outer(positions, theta**-exponent)
        return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def rotate(
    q: Tensor, k: Tensor, theta: float, start: int | Sequence[int] = 0
) -> tuple[Tensor, Tensor]:
    """Turn each pair of ``q`` ``[B, S, H, K]`` and ``k`` ``[B, S, N, K]`` by its position's angle.

    Args:
        q: queries; K must be even (held by the config check).
        k: keys.
        theta: base of the geometric series of wavelengths.
        start: position of the first row; or, where the rows are equal chunks from several places of
            a sequence, that of each chunk's first row.

    Returns:
        New tensors like ``q`` and ``k``.
    """
    starts = (start,) if isinstance(start, int) else tuple(start)
    each = q.shape[1] // len(starts)
    # One table for all starts of whole sequences: those that grow token by token share it.
    skipped = starts[0] if len(starts) == 1 else 0
    chunks = tuple((first - skipped, first + each) for first in starts)
    dtype = q.dtype if q.itemsize >= 4 else torch.float32
    cos, sin = _table(chunks, q.shape[-1], theta, q.device, dtype)
    return rotary(q, k, cos[skipped:], sin[skipped:])
