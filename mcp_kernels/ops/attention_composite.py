"""Attention in differentiable torch operations: for second gradients and for the probabilities.

The same formulas as ``attention_reference.py``, with the whole score matrix in memory and autograd
left to torch. It is what the backward of the backward runs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mcp_kernels.ops.attention_mask import alibi_distance, dropout_keep, visible_mask
from mcp_kernels.ops.attention_scores import AttentionInputs


def attention_composite(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """(out ``[B, Sq, H, E]``, lse ``[B, H, Sq]``), differentiable as often as one likes.

    Cost: O(B H Sq Sk) memory.
    """
    s = _scores(inputs)
    lse = torch.logsumexp(s, -1)
    if inputs.sink is not None:
        lse = torch.logaddexp(lse, inputs.sink.to(s.dtype)[None, :, None])
    is_dead = lse == -math.inf
    p = torch.exp(s - lse.masked_fill(is_dead, math.inf)[..., None])
    if inputs.rng is not None:
        dropout_p = inputs.options.dropout_p
        p = p * _keep(inputs).to(p.dtype) * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0)
    group = s.shape[1] // max(1, inputs.v.shape[2])
    v = inputs.v.to(s.dtype).repeat_interleave(group, dim=2)
    out = torch.einsum("bhij,bjhe->bihe", p, v)
    return out.to(inputs.q.dtype), lse


def attention_probabilities(inputs: AttentionInputs, lse: Tensor) -> Tensor:
    """``[B, H, Sq, Sk]`` probabilities before dropout, negative where dropout drops.

    Cost: O(B H Sq Sk) memory.
    """
    p = torch.exp(_scores(inputs) - lse.masked_fill(lse == -math.inf, math.inf)[..., None])
    if inputs.rng is not None:
        p = torch.where(_keep(inputs), p, -p)
    return p.to(inputs.q.dtype)


def _scores(inputs: AttentionInputs) -> Tensor:
    """``[B, H, Sq, Sk]`` scores with everything but the sink, -inf where hidden."""
    options = inputs.options
    num_rows, num_keys = inputs.q.shape[1], inputs.k.shape[1]
    dtype, device = inputs.compute_dtype, inputs.q.device
    group = inputs.q.shape[2] // max(1, inputs.k.shape[2])
    k = inputs.k.to(dtype).repeat_interleave(group, dim=2)
    s = torch.einsum("bihd,bjhd->bhij", inputs.q.to(dtype), k) * options.softmax_scale
    if options.softcap > 0:
        s = options.softcap * torch.tanh(s / options.softcap)
    if inputs.bias is not None:
        if inputs.bias.dtype == torch.bool:
            s = s.masked_fill(~inputs.bias, -math.inf)
        else:
            s = s + inputs.bias.to(dtype)
    if inputs.alibi_slopes is not None:
        rows, keys = (torch.arange(n, device=device) for n in (num_rows, num_keys))
        distance = alibi_distance(rows, keys, options.offset(num_rows, num_keys)).to(dtype)
        s = s - inputs.alibi_slopes.to(dtype)[:, :, None, None] * distance
    if options.is_windowed:
        visible = visible_mask(options, num_rows, num_keys, device)
        s = s.masked_fill(~visible, -math.inf)
    return s


def _keep(inputs: AttentionInputs) -> Tensor:
    batch, num_rows, heads, _ = inputs.q.shape
    positions = (
        torch.arange(n, device=inputs.q.device) for n in (batch, heads, num_rows, inputs.k.shape[1])
    )
    batches, *others = positions
    assert inputs.rng is not None
    return dropout_keep(inputs.rng, inputs.options.dropout_p, batches + inputs.first_batch, *others)
