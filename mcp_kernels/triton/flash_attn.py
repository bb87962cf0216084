"""The Triton bodies of ``flash_attn`` and ``flash_attn_varlen``, forward and backward.

Arguments and results are those of the ops, checked before; nothing here waits for the GPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mcp_kernels.ops.attention_mask import AttentionOptions
from mcp_kernels.triton.flash_attn_backward import run_backward
from mcp_kernels.triton.flash_attn_forward import run_forward
from mcp_kernels.triton.flash_attn_launch import Problem, Sequences, unit_stride


def flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    rng: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """The body of ``flash_attn``."""
    return run_forward(_problem((q, k, v), bias, alibi_slopes, sink, rng, options))


def flash_attn_bwd(  # noqa: PLR0913
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    rng: Tensor | None,
    needs_dbias: bool,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The body of ``flash_attn_bwd``."""
    problem = _problem((q, k, v), bias, alibi_slopes, sink, rng, options)
    return run_backward(problem, dout, dlse, out, lse, needs_dbias=needs_dbias)


def flash_attn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    rng: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """The body of ``flash_attn_varlen``."""
    problem = _varlen_problem(
        (q, k, v), cu_seqlens_q, cu_seqlens_k, alibi_slopes, sink, rng, options
    )
    if problem is None:
        shape = (q.shape[0], q.shape[1], v.shape[2])
        lse = torch.full((q.shape[1], q.shape[0]), -math.inf, device=q.device)
        return torch.zeros(shape, dtype=q.dtype, device=q.device), lse
    return run_forward(problem)


def flash_attn_varlen_bwd(  # noqa: PLR0913
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    rng: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The body of ``flash_attn_varlen_bwd``."""
    problem = _varlen_problem(
        (q, k, v), cu_seqlens_q, cu_seqlens_k, alibi_slopes, sink, rng, options
    )
    if problem is None:
        dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        return dq, dk, dv, q.new_empty(0) if sink is None else torch.zeros_like(sink)
    dq, dk, dv, _, dsink = run_backward(problem, dout, dlse, out, lse, needs_dbias=False)
    return dq, dk, dv, dsink


def _problem(
    qkv: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    rng: Tensor | None,
    options: tuple[Any, ...],
    sequences: Sequences | None = None,
) -> Problem:
    """The call as the kernels take it."""
    q, k, v = (unit_stride(t) for t in qkv)
    return Problem(q, k, v, bias, alibi_slopes, sink, rng, AttentionOptions(*options), sequences)


def _varlen_problem(
    qkv: tuple[Tensor, Tensor, Tensor],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    rng: Tensor | None,
    options: tuple[Any, ...],
) -> Problem | None:
    """The call as the kernels take it; None where there is no sequence at all."""
    if cu_seqlens_q.numel() <= 1:
        return None
    sequences = Sequences.of(cu_seqlens_q, cu_seqlens_k, qkv[0].shape[0], qkv[1].shape[0])
    return _problem(qkv, None, alibi_slopes, sink, rng, options, sequences)
