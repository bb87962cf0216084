"""``flash_attn_varlen_func`` and its packed forms: FlashAttention-2's names, order and defaults.

Letters: T = rows of all sequences, B = sequences, H = query heads, N = KV heads, D = head dim of q
and k, E = head dim of v.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mcp_kernels.ops.attention_varlen  # noqa: F401  (defines the op)
from mcp_kernels.ops._autocast import under_autocast
from mcp_kernels.ops.attention_check import (
    CausalAlign,
    check_alibi,
    check_cu_seqlens,
    check_qkv,
    check_sink,
    make_options,
    make_rng,
)
from mcp_kernels.ops.attention_paged import gather_pages


def flash_attn_varlen_func(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    causal_align: CausalAlign = "bottom_right",
    sink: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of many sequences laid end to end, each over its own keys; differentiable.

    Args:
        q: ``[Tq, H, D]``, any strides; float64, float32, bfloat16 or float16.
        k: ``[Tk, N, D]``; with ``block_table`` pages ``[P, page size, N, D]``.
        v: ``[Tk, N, E]``; with ``block_table`` pages ``[P, page size, N, E]``.
        cu_seqlens_q: ``[B + 1]`` int32 or int64: 0, then where each sequence of q ends. Rows past
            the last end are slack: 0 in the result and in every gradient.
        cu_seqlens_k: the same of k.
        max_seqlen_q: taken for FlashAttention's sake; what is computed depends on cu_seqlens alone.
        max_seqlen_k: as ``max_seqlen_q``.
        dropout_p: as in ``flash_attn_func``; (b, i, j) count sequences and places in them.
        softmax_scale: as in ``flash_attn_func``.
        causal: as there, within each sequence.
        window_size: as there, within each sequence.
        softcap: as there.
        alibi_slopes: ``[H]`` or ``[B, H]``. No gradient.
        deterministic: results are always repeatable bit by bit.
        return_attn_probs: return ``(out, lse, None)``: the probabilities of sequences of different
            lengths have no one shape, call ``flash_attn_func`` on one sequence to see its own.
        block_table: ``[B, max pages]`` int; page of the keys ``p * page size ..`` of sequence b.
            Entries past a sequence's end are never read.
        causal_align: as in ``flash_attn_func``.
        sink: ``[H]``; as in ``flash_attn_func``.
        return_lse: return ``(out, lse)``.

    Returns:
        ``out`` contiguous ``[Tq, H, E]`` of q's dtype, ``lse`` ``[H, Tq]`` float32 (float64 for
        float64), -inf on rows that see no key and on slack.

    Raises:
        ValueError: a shape, device or value does not fit; cu_seqlens are checked where they are on
            the CPU.
        TypeError: a dtype does not fit.

    Cost: that of ``flash_attn_func`` on each sequence.
    """
    op = "flash_attn_varlen_func"
    q, k, v = under_autocast(q, k, v)
    batch = cu_seqlens_q.numel() - 1
    if block_table is not None:
        k, v = (gather_pages(op, t, block_table, cu_seqlens_k) for t in (k, v))
    check_qkv(op, q, k, v, rank=3)
    check_cu_seqlens(op, "cu_seqlens_q", cu_seqlens_q, q.shape[0])
    check_cu_seqlens(op, "cu_seqlens_k", cu_seqlens_k, k.shape[0])
    if cu_seqlens_k.numel() - 1 != batch:
        raise ValueError(
            f"{op}: cu_seqlens_q and cu_seqlens_k must be of one length, got {batch + 1} "
            f"and {cu_seqlens_k.numel()}"
        )
    options = make_options(
        op,
        q.shape[2],
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        causal_align=causal_align,
    )
    slopes = check_alibi(op, alibi_slopes, batch, q.shape[1])
    sink = check_sink(op, sink, q.shape[1])
    rng = make_rng(op, dropout_p, q.device)
    out, lse = torch.ops.mcp_kernels.flash_attn_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, slopes, sink, rng, *options
    )
    if return_attn_probs:
        return out, lse, None
    return (out, lse) if return_lse else out


def flash_attn_varlen_qkvpacked_func(  # noqa: PLR0913
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
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
    """``flash_attn_varlen_func`` of one packed tensor.

    Args:
        qkv: ``[T, 3, H, D]``, any strides.
        cu_seqlens: as in ``flash_attn_varlen_func``, for q and k alike.
        max_seqlen: as there, like all that follow.
        dropout_p: as there.
        softmax_scale: as there.
        causal: as there.
        window_size: as there.
        softcap: as there.
        alibi_slopes: as there.
        deterministic: as there.
        return_attn_probs: as there.
        **extras: the keyword-only arguments of ``flash_attn_varlen_func``.

    Returns:
        What ``flash_attn_varlen_func`` returns.

    Raises:
        ValueError: ``qkv`` is not ``[T, 3, H, D]``, or as ``flash_attn_varlen_func``.
    """
    if qkv.dim() != 4 or qkv.shape[1] != 3:
        raise ValueError(
            f"flash_attn_varlen_qkvpacked_func: qkv must be [T, 3, H, D], got {list(qkv.shape)}"
        )
    return flash_attn_varlen_func(
        qkv[:, 0],
        qkv[:, 1],
        qkv[:, 2],
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
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


def flash_attn_varlen_kvpacked_func(  # noqa: PLR0913
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
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
    """``flash_attn_varlen_func`` with k and v in one tensor.

    Args:
        q: ``[Tq, H, D]``.
        kv: ``[Tk, 2, N, D]``, any strides.
        cu_seqlens_q: as in ``flash_attn_varlen_func``, like all that follow.
        cu_seqlens_k: as there.
        max_seqlen_q: as there.
        max_seqlen_k: as there.
        dropout_p: as there.
        softmax_scale: as there.
        causal: as there.
        window_size: as there.
        softcap: as there.
        alibi_slopes: as there.
        deterministic: as there.
        return_attn_probs: as there.
        **extras: the keyword-only arguments of ``flash_attn_varlen_func``.

    Returns:
        What ``flash_attn_varlen_func`` returns.

    Raises:
        ValueError: ``kv`` is not ``[Tk, 2, N, D]``, or as ``flash_attn_varlen_func``.
    """
    if kv.dim() != 4 or kv.shape[1] != 2:
        raise ValueError(
            f"flash_attn_varlen_kvpacked_func: kv must be [T, 2, N, D], got {list(kv.shape)}"
        )
    return flash_attn_varlen_func(
        q,
        kv[:, 0],
        kv[:, 1],
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
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
