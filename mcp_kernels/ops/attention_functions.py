"""``flash_attn_func`` and its packed forms: FlashAttention-2's names, order and defaults.

Letters: B = batch, Sq / Sk = query rows / keys, H = query heads, N = KV heads, D = head dim of q
and k, E = head dim of v.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mcp_kernels.ops.attention as _core
from mcp_kernels._op import call
from mcp_kernels.ops._autocast import under_autocast
from mcp_kernels.ops.attention_check import (
    CausalAlign,
    check_alibi,
    check_bias,
    check_qkv,
    check_sink,
    make_options,
    make_rng,
)
from mcp_kernels.ops.attention_composite import attention_probabilities


def flash_attn_func(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    causal_align: CausalAlign = "bottom_right",
    sink: Tensor | None = None,
    bias: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of ``q`` over ``k`` and ``v``, differentiable, as often as one likes.

    Args:
        q: ``[B, Sq, H, D]``, any strides; float64, float32, bfloat16 or float16.
        k: ``[B, Sk, N, D]``, q's dtype; H is a multiple of N, query head h uses KV head
            ``h // (H / N)``.
        v: ``[B, Sk, N, E]``; E may differ from D.
        dropout_p: probability of dropping a probability, in [0, 1]; the mask is a function of a
            seed drawn once from torch's default generator and of (b, h, i, j) alone.
        softmax_scale: factor of ``q k^T``; None is ``1 / sqrt(D)``.
        causal: row i sees key j only where ``j <= i + offset``.
        window_size: (left, right) keys around the diagonal that a row sees, both ends included; -1
            is no limit. ``causal`` makes right 0.
        softcap: c > 0 turns a scaled score s into ``c tanh(s / c)``, before bias and ALiBi.
        alibi_slopes: ``[H]`` or ``[B, H]``; subtracts ``slope * |i + offset - j|``. No gradient.
        deterministic: taken for FlashAttention's sake; results are always repeatable bit by bit.
        return_attn_probs: return ``(out, lse, probs)``, probs ``[B, H, Sq, Sk]``, negative where
            dropped. For tests: it is the one thing here that takes O(Sq Sk) memory.
        causal_align: "bottom_right" aligns the ends of q and k (offset = Sk - Sq), "top_left" their
            starts (offset = 0); windows and ALiBi follow.
        sink: ``[H]``; ``exp(sink)`` joins each row's denominator. Differentiable.
        bias: broadcast to ``[B, H, Sq, Sk]``; bool (True is attend), or added to the scaled scores.
            Differentiable where floating.
        return_lse: return ``(out, lse)``.

    Returns:
        ``out`` contiguous ``[B, Sq, H, E]`` of q's dtype; a row that sees no key is 0. ``lse``
        ``[B, H, Sq]``, natural log, float32 (float64 for float64), differentiable, taken before
        dropout; -inf on a row that sees no key.

    Raises:
        ValueError: a shape, device or value does not fit.
        TypeError: a dtype does not fit.

    Cost: 2 B H Sq Sk (D + E) flops, half where causal, 2.5 times that in backward; the reference
    holds at most some MiB of scores at a time.
    """
    op = "flash_attn_func"
    q, k, v = under_autocast(q, k, v)
    check_qkv(op, q, k, v)
    batch, num_rows, heads, head_dim = q.shape
    options = make_options(
        op,
        head_dim,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        causal_align=causal_align,
    )
    bias = check_bias(op, bias, (batch, heads, num_rows, k.shape[1]))
    slopes = check_alibi(op, alibi_slopes, batch, heads)
    sink = check_sink(op, sink, heads)
    rng = make_rng(op, dropout_p, q.device)
    op_call = torch.ops.mcp_kernels.flash_attn.default
    out, lse = call(op_call, q, k, v, bias, slopes, sink, rng, *options)
    if return_attn_probs:
        inputs = _core.make_inputs((q, k, v), bias, slopes, sink, rng, options)
        with torch.no_grad():
            return out, lse, attention_probabilities(inputs, lse)
    return (out, lse) if return_lse else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Any,
) -> Any:
    """``flash_attn_func`` of one packed tensor.

    Args:
        qkv: ``[B, S, 3, H, D]``, any strides.
        dropout_p: as in ``flash_attn_func``, like all that follow.
        softmax_scale: as there.
        causal: as there.
        window_size: as there.
        softcap: as there.
        alibi_slopes: as there.
        deterministic: as there.
        return_attn_probs: as there.
        **extras: the keyword-only arguments of ``flash_attn_func``.

    Returns:
        What ``flash_attn_func`` returns.

    Raises:
        ValueError: ``qkv`` is not ``[B, S, 3, H, D]``, or as ``flash_attn_func``.
    """
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(
            f"flash_attn_qkvpacked_func: qkv must be [B, S, 3, H, D], got {list(qkv.shape)}"
        )
    return flash_attn_func(
        qkv[:, :, 0],
        qkv[:, :, 1],
        qkv[:, :, 2],
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        **extras,
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Any,
) -> Any:
    """``flash_attn_func`` with k and v in one tensor.

    Args:
        q: ``[B, Sq, H, D]``.
        kv: ``[B, Sk, 2, N, D]``, any strides.
        dropout_p: as in ``flash_attn_func``, like all that follow.
        softmax_scale: as there.
        causal: as there.
        window_size: as there.
        softcap: as there.
        alibi_slopes: as there.
        deterministic: as there.
        return_attn_probs: as there.
        **extras: the keyword-only arguments of ``flash_attn_func``.

    Returns:
        What ``flash_attn_func`` returns.

    Raises:
        ValueError: ``kv`` is not ``[B, Sk, 2, N, D]``, or as ``flash_attn_func``.
    """
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(
            f"flash_attn_kvpacked_func: kv must be [B, Sk, 2, N, D], got {list(kv.shape)}"
        )
    return flash_attn_func(
        q,
        kv[:, :, 0],
        kv[:, :, 1],
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        **extras,
    )
