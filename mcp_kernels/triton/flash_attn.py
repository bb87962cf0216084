"""The Triton bodies of ``flash_attn``, ``flash_attn_varlen`` and ``flash_attn_kvcache``.

Arguments and results are those of the ops, checked before; nothing here waits for the GPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mcp_kernels.ops.attention import split_delta
from mcp_kernels.ops.attention_mask import AttentionOptions
from mcp_kernels.triton.flash_attn_backward import run_backward
from mcp_kernels.triton.flash_attn_cache import Cache, append, full_cache, rotate_at
from mcp_kernels.triton.flash_attn_decode import run_decode
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
    problem = make_problem(q, k, v, bias, alibi_slopes, sink, rng, *options)
    if is_decode(problem):
        return run_decode(problem, full_cache(problem.batch, problem.keys, q.device))
    return run_forward(problem)


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
    options, delta = split_delta(options)
    problem = make_problem(q, k, v, bias, alibi_slopes, sink, rng, *options)
    return run_backward(problem, dout, dlse, out, lse, needs_dbias=needs_dbias, delta=delta)


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
    options, delta = split_delta(options)
    problem = _varlen_problem(
        (q, k, v), cu_seqlens_q, cu_seqlens_k, alibi_slopes, sink, rng, options
    )
    if problem is None:
        dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        return dq, dk, dv, q.new_empty(0) if sink is None else torch.zeros_like(sink)
    dq, dk, dv, _, dsink = run_backward(
        problem, dout, dlse, out, lse, needs_dbias=False, delta=delta
    )
    return dq, dk, dv, dsink


def flash_attn_kvcache(  # noqa: PLR0913
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: Tensor,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    rotary_interleaved: bool,
    *scalars: Any,
) -> tuple[Tensor, Tensor]:
    """The body of ``flash_attn_kvcache``; lengths and tables are not read to be checked."""
    options = AttentionOptions(*scalars, dropout_p=0.0)
    lengths = cache_seqlens
    if k is not None and v is not None:
        if rotary_cos is not None and rotary_sin is not None:
            before = lengths.long() if cache_leftpad is None else lengths.long() - cache_leftpad
            steps = torch.arange(max(k.shape[1], q.shape[1]), device=q.device)
            positions = before[:, None] + steps
            angles = (rotary_cos, rotary_sin)
            q_rows = q.shape[1] if options.is_windowed else 1
            q = rotate_at(q, *angles, positions[:, :q_rows], rotary_interleaved)
            k = rotate_at(k, *angles, positions[:, : k.shape[1]], rotary_interleaved)
        append((k_cache, v_cache), (k, v), lengths, cache_batch_idx, block_table)
        lengths = lengths + k.shape[1]
    problem = make_problem(q, k_cache, v_cache, None, alibi_slopes, sink, None, *options)
    capacity = k_cache.shape[1]
    if block_table is not None:
        capacity *= block_table.shape[1]
    cache = Cache(lengths, cache_batch_idx, cache_leftpad, block_table, capacity)
    return run_decode(problem, cache)


# Rows of a group that fit one tile, over at least this many keys a row: the forward kernel would
# leave most of a GPU idle. Nothing but the shape decides.
_DECODE_ROWS = 64
_DECODE_KEYS = 512


def is_decode(problem: Problem) -> bool:
    """Whether a plain call is one of few rows over many keys, of what the decode kernel takes."""
    packed = problem.rows * problem.heads // max(1, problem.kv_heads)
    return problem.is_plain and packed <= _DECODE_ROWS and problem.keys >= _DECODE_KEYS


def make_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    rng: Tensor | None,
    *options: Any,
    sequences: Sequences | None = None,
) -> Problem:
    """The arguments of ``flash_attn`` as the kernels take them."""
    q, k, v = (unit_stride(t) for t in (q, k, v))
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
    return make_problem(*qkv, None, alibi_slopes, sink, rng, *options, sequences=sequences)
