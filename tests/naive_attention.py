"""Attention one row at a time, straight from its semantics, in float64 with torch's autograd.

The oracle of the attention tests: no masks, no blocks, no formula for a gradient. Hidden keys are
left out by index, so that nothing they hold can matter.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    causal_align: str = "bottom_right",
    sink: Tensor | None = None,
    bias: Tensor | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(out ``[B, Sq, H, E]``, lse ``[B, H, Sq]``) in float64; ``keep`` is the dropout mask."""
    q, k, v = q.double(), k.double(), v.double()
    batch, num_rows, heads, head_dim = q.shape
    num_keys, group = k.shape[1], max(1, heads // max(1, k.shape[2]))
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    offset = num_keys - num_rows if causal_align == "bottom_right" else 0
    out_rows, lse_rows = [], []
    for b in range(batch):
        for h in range(heads):
            for i in range(num_rows):
                left, right = window_size
                seen = [
                    j
                    for j in range(num_keys)
                    if (not causal or j <= i + offset)
                    and (left < 0 or j >= i + offset - left)
                    and (right < 0 or causal or j <= i + offset + right)
                ]
                row_bias = None if bias is None else bias.expand(batch, heads, num_rows, num_keys)
                if row_bias is not None:
                    row_bias = row_bias[b, h, i]
                    is_hidden = ~row_bias if row_bias.dtype == torch.bool else row_bias == -math.inf
                    seen = [j for j in seen if not is_hidden[j]]
                s = (k[b, seen, h // group] @ q[b, i, h]) * scale
                if softcap:
                    s = softcap * torch.tanh(s / softcap)
                if row_bias is not None and row_bias.dtype != torch.bool:
                    s = s + row_bias[seen].double()
                if alibi_slopes is not None:
                    slope = alibi_slopes.expand(batch, heads)[b, h].double()
                    s = s - slope * torch.tensor([abs(i + offset - j) for j in seen]).double()
                terms = s if sink is None else torch.cat([s, sink[h].double().view(1)])
                if terms.numel() == 0:
                    out_rows.append(v.new_zeros(v.shape[3]))
                    lse_rows.append(v.new_full((), -math.inf))
                    continue
                lse = torch.logsumexp(terms, 0)
                p = torch.exp(s - lse)
                if keep is not None:
                    p = p * keep[b, h, i, seen].double() / (1 - dropout_p if dropout_p < 1 else 1)
                out_rows.append(p @ v[b, seen, h // group])
                lse_rows.append(lse)
    if not out_rows:
        return q.new_zeros(batch, num_rows, heads, v.shape[3]), q.new_zeros(batch, heads, num_rows)
    out = torch.stack(out_rows).view(batch, heads, num_rows, -1).transpose(1, 2)
    return out, torch.stack(lse_rows).view(batch, heads, num_rows)
