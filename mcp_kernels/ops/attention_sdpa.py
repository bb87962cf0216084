"""``scaled_dot_product_attention`` with torch's signature and semantics, on the flash op.

Letters: B = all leading dimensions but the last, H = query heads, L / S = query rows / keys, D =
head dim of query and key, E = head dim of value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcp_kernels.ops._autocast import under_autocast
from mcp_kernels.ops.attention_check import check_bias, check_qkv, make_options, make_rng

_OP = "scaled_dot_product_attention"


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention over ``[..., H, L, D]``, as ``torch.nn.functional`` has it.

    Args:
        query: ``[..., H, L, D]``; leading dimensions may be missing or many, and broadcast.
        key: ``[..., H, S, D]``.
        value: ``[..., H, S, E]``.
        attn_mask: broadcast to ``[..., H, L, S]``; bool (True is attend), or added to the scaled
            scores. Differentiable where floating.
        dropout_p: probability of dropping a probability. As in torch it drops whenever it is above
            0: pass 0 in evaluation.
        is_causal: row i sees keys ``j <= i``, both counted from the start, whatever L and S are.
            With ``attn_mask``, both hide.
        scale: factor of ``query key^T``; None is ``1 / sqrt(D)``.
        enable_gqa: key and value may have fewer heads, a divisor of H.

    Returns:
        ``[..., H, L, E]`` of query's dtype; for four dimensions with the memory order of
        ``[B, L, H, E]``, as torch's flash attention on CPU returns it. A row that sees no key is 0.

    Raises:
        ValueError: a shape, device or value does not fit.
        TypeError: a dtype does not fit.

    Cost: as ``flash_attn_func``.
    """
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise ValueError(f"{_OP}: query, key and value must be at least [L, D]")
    query, key, value = under_autocast(query, key, value)
    lead = _leading_shape(query, key, value, enable_gqa)
    q, k, v = (_as_bshd(t, lead, enable_gqa) for t in (query, key, value))
    check_qkv(_OP, q, k, v)
    batch, num_rows, heads, head_dim = q.shape
    options = make_options(
        _OP,
        head_dim,
        dropout_p=dropout_p,
        softmax_scale=scale,
        causal=is_causal,
        window_size=(-1, -1),
        softcap=0.0,
        causal_align="top_left",
    )
    if attn_mask is not None and len(lead) != 2:
        full = attn_mask.expand(*lead, num_rows, k.shape[1])
        attn_mask = full.reshape(batch, heads, num_rows, k.shape[1])
    bias = check_bias(_OP, attn_mask, (batch, heads, num_rows, k.shape[1]))
    rng = make_rng(_OP, dropout_p, q.device)
    out, _ = torch.ops.mcp_kernels.flash_attn(q, k, v, bias, None, None, rng, *options)
    return out.transpose(1, 2).reshape(*lead, num_rows, v.shape[3])


def _leading_shape(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """Everything before ``[L, D]``, broadcast; with GQA the heads are the query's."""
    shapes = [t.shape[:-2] for t in (query, key, value)]
    if enable_gqa and min(map(len, shapes)) > 0:
        return (*torch.broadcast_shapes(*(s[:-1] for s in shapes)), shapes[0][-1])
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        raise ValueError(
            f"{_OP}: query, key and value must have the same leading dimensions, got "
            f"{[list(s) for s in shapes]}; fewer key heads need enable_gqa=True"
        ) from None


def _as_bshd(x: Tensor, lead: tuple[int, ...], enable_gqa: bool) -> Tensor:
    """``[..., H, S, D]`` as a view ``[B, S, H, D]`` where strides allow it."""
    heads = x.shape[-3] if enable_gqa and x.dim() > 2 else (lead[-1] if lead else 1)
    expanded = x.expand(*lead[:-1], heads, *x.shape[-2:])
    batch = torch.Size(lead[:-1]).numel()
    return expanded.reshape(batch, *expanded.shape[-3:]).transpose(1, 2)
