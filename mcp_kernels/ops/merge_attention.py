"""Join attention over parts of the keys into attention over all of them.

    lse = log(sum_i exp lse_i)        out = sum_i exp(lse_i - lse) out_i

What ring attention and split-KV decoding need. Parts that saw no key (lse = -inf) add nothing, and
a row that no part saw stays 0 with lse -inf.

Source: Dao et al., "FlashAttention" (2022), section 3.1: the softmax of a concatenation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def merge_attention(
    outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor
) -> tuple[Tensor, Tensor]:
    """Combine results of the same queries over disjoint parts of the keys; differentiable.

    Args:
        outs: results ``[B, S, H, E]`` (or ``[total, H, E]``), a sequence or stacked in front. Their
            parts should be float32 where many are joined: each rounding of a part is kept.
        lses: natural-log normalisers ``[B, H, S]`` (or ``[H, total]``), float32 or float64.

    Returns:
        ``out`` in the dtype of ``outs`` and ``lse`` in that of ``lses``, shaped like one part.

    Raises:
        ValueError: no parts, or their numbers or shapes differ.

    Cost: reads each part once.
    """
    out_parts = list(outs.unbind(0)) if isinstance(outs, Tensor) else list(outs)
    lse_parts = list(lses.unbind(0)) if isinstance(lses, Tensor) else list(lses)
    _check(out_parts, lse_parts)
    lse = torch.stack(lse_parts)
    with torch.no_grad():
        # Any finite shift gives the same result; the maximum keeps the exponentials in range.
        shift = lse.amax(0)
        is_dead = shift == -math.inf
        shift = shift.masked_fill(is_dead, 0.0)
    weights = torch.exp(lse - shift)
    total = weights.sum(0).masked_fill(is_dead, 1.0)
    shares = (weights / total).transpose(-1, -2).unsqueeze(-1)  # [parts, B, S, H, 1]
    merged = shares[0] * out_parts[0].to(lse.dtype)
    for share, part in zip(shares[1:], out_parts[1:], strict=True):
        merged = torch.addcmul(merged, share, part.to(lse.dtype))
    merged_lse = (shift + total.log()).masked_fill(is_dead, -math.inf)
    return merged.to(out_parts[0].dtype), merged_lse


def _check(outs: list[Tensor], lses: list[Tensor]) -> None:
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"merge_attention: outs and lses must be as many, at least one, "
            f"got {len(outs)} and {len(lses)}"
        )
    for out, lse in zip(outs, lses, strict=True):
        *lead, num_rows, heads, _ = out.shape
        if out.shape != outs[0].shape or lse.shape != (*lead, heads, num_rows):
            raise ValueError(
                "merge_attention: every out must be [..., S, H, E] of one shape with an lse "
                f"[..., H, S], got {list(out.shape)} and {list(lse.shape)}"
            )
