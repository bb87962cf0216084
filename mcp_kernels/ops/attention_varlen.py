"""Attention over sequences of different lengths laid end to end, without padding.

Sequence b owns query rows ``cu_seqlens_q[b] .. cu_seqlens_q[b + 1]`` and keys likewise; each is
attention of its own, with its own alignment of causal masks and windows. Rows past the last
sequence (slack) are 0 in the result and in every gradient.

Letters: T = rows of all sequences, B = sequences, H = query heads, N = KV heads, D = head dim of q
and k, E = head dim of v.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mcp_kernels._op import call, define_op
from mcp_kernels._transforms import shared
from mcp_kernels.ops.attention import (
    lse_dtype,
    make_inputs,
    refuse_second_gradients,
    refuse_slope_gradients,
    split_delta,
)
from mcp_kernels.ops.attention_check import JOIN_SAMPLES
from mcp_kernels.ops.attention_composite import attention_composite, second_gradients
from mcp_kernels.ops.attention_mask import AttentionOptions
from mcp_kernels.ops.attention_reference import attention_backward, attention_forward
from mcp_kernels.ops.attention_scores import AttentionInputs
from mcp_kernels.saved import keep_exact

_COMMON = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? alibi_slopes, Tensor? sink, Tensor? rng,"
    " float softmax_scale, int window_left, int window_right, bool top_left, float softcap,"
    " float dropout_p"
)


def _sequences(
    qkv: tuple[Tensor, Tensor, Tensor], *rest: Any
) -> Iterator[tuple[slice, slice, AttentionInputs]]:
    """(query rows, keys, inputs ``[1, S, H, D]``) of each sequence that has rows or keys."""
    cu_seqlens_q, cu_seqlens_k, slopes, sink, rng, *options = rest
    q, k, v = qkv
    q_bounds, k_bounds = (
        shared("flash_attn_varlen", name, ends, JOIN_SAMPLES).tolist()
        for name, ends in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))
    )
    for b in range(len(q_bounds) - 1):
        rows, keys = slice(*q_bounds[b : b + 2]), slice(*k_bounds[b : b + 2])
        if rows.start == rows.stop:
            continue
        own_slopes = None
        if slopes is not None:
            own_slopes = slopes[b : b + 1] if slopes.shape[0] > 1 else slopes
        yield (
            rows,
            keys,
            make_inputs(
                (q[None, rows], k[None, keys], v[None, keys]),
                None,
                own_slopes,
                sink,
                rng,
                AttentionOptions(*options),
                first_batch=b,
            ),
        )


def _forward_ref(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out, lse = _forward_fake(q, k, v)
    out.zero_()
    lse.fill_(-math.inf)
    for rows, _, inputs in _sequences((q, k, v), *rest):
        attention_forward(inputs, out[None, rows], lse[None, :, rows])
    return out, lse


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    total, heads, _ = q.shape
    return q.new_empty(total, heads, v.shape[2]), q.new_empty(heads, total, dtype=lse_dtype(q))


def _forward_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, slopes, sink, rng, *options = inputs
    ctx.set_materialize_grads(False)
    ctx.options = options
    keep_exact(output[1])
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k, slopes, sink, rng)


def _forward_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, *rest = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    needs = ctx.needs_input_grad
    refuse_slope_gradients("flash_attn_varlen", needs=needs[5])
    grads = call(
        torch.ops.mcp_kernels.flash_attn_varlen_bwd.default,
        dout,
        dlse,
        q,
        k,
        v,
        out,
        lse,
        *rest,
        *ctx.options,
    )
    dq, dk, dv, dsink = (
        grad if need else None for grad, need in zip(grads, (*needs[:3], needs[6]), strict=True)
    )
    return dq, dk, dv, None, None, None, dsink, None, *([None] * len(ctx.options))


def _without_delta(rest: Sequence[Any]) -> tuple[tuple[Any, ...], Tensor | None]:
    """(cu_seqlens, slopes, sink, rng and options) of a backward call, and its ``delta``."""
    options, delta = split_delta(rest[5:])
    return (*rest[:5], *options), delta


def _backward_ref(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    rest, delta = _without_delta(rest)
    sink = rest[3]
    dsink = q.new_empty(0) if sink is None else torch.zeros_like(sink, dtype=lse.dtype)
    for rows, keys, inputs in _sequences((q, k, v), *rest):
        own_dlse = None if dlse is None else dlse[None, :, rows]
        own_dq, own_dk, own_dv, own_dsink = attention_backward(
            inputs,
            dout[None, rows],
            own_dlse,
            lse[None, :, rows],
            None,
            None if delta is None else delta[None, :, rows],
        )
        dq[rows], dk[keys], dv[keys] = own_dq[0], own_dk[0], own_dv[0]
        if own_dsink is not None:
            dsink += own_dsink
    return dq, dk, dv, dsink if sink is None else dsink.to(sink.dtype)


def _backward_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sink = rest[5]
    dsink = q.new_empty(0) if sink is None else sink.new_empty(sink.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink


def _backward_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    dout, dlse, q, k, v, _, _, *rest = inputs
    ctx.set_materialize_grads(False)
    rest, delta = _without_delta(rest)
    ctx.is_part = delta is not None
    ctx.options = rest[5:]
    ctx.save_for_backward(dout, dlse, q, k, v, *rest[:5])


def _backward_backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    refuse_second_gradients("flash_attn_varlen_bwd", is_part=ctx.is_part)
    dout, dlse, q, k, v, cu_seqlens_q, cu_seqlens_k, slopes, sink, rng = ctx.saved_tensors

    def composite(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        rest = (cu_seqlens_q, cu_seqlens_k, slopes, sink, rng, *ctx.options)
        out, lse = _forward_fake(q, k, v)
        out, lse = torch.zeros_like(out), torch.full_like(lse, -math.inf)
        for rows, _, inputs in _sequences((q, k, v), *rest):
            own_out, own_lse = attention_composite(inputs)
            out = torch.slice_scatter(out, own_out[0], 0, rows.start, rows.stop)
            lse = torch.slice_scatter(lse, own_lse[0], 1, rows.start, rows.stop)
        return out, lse

    d_dout, d_dlse, dq, dk, dv, dsink = second_gradients(
        composite, (q, k, v, sink), dout, dlse, (True, True, True, True), grads
    )
    rest = [None] * (2 + len(ctx.options))
    return d_dout, d_dlse, dq, dk, dv, None, None, None, None, None, dsink, *rest


define_op(
    f"flash_attn_varlen(Tensor q, Tensor k, Tensor v, {_COMMON}) -> (Tensor out, Tensor lse)",
    reference=_forward_ref,
    fake=_forward_fake,
    backward=_forward_backward,
    setup_context=_forward_setup,
)
define_op(
    "flash_attn_varlen_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out,"
    f" Tensor lse, {_COMMON}, Tensor? delta=None)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)",
    reference=_backward_ref,
    fake=_backward_fake,
    backward=_backward_backward,
    setup_context=_backward_setup,
)
