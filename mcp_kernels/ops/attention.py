"""Flash attention, the core op: ``flash_attn`` and its backward ``flash_attn_bwd``.

The public functions of this file carry FlashAttention-2's names, order and defaults, tensors
``[B, S, H, D]``; everything more is keyword-only. The formulas are in ``attention_reference.py``.

    flash_attn(q, k, v, bias, slopes, sink, rng, *options) -> (out, lse)
    flash_attn_bwd(dout, dlse, q, k, v, out, lse, ..., delta=None) -> (dq, dk, dv, dbias, dsink)

Both may be differentiated: the backward of the backward recomputes with plain torch operations.
Where ``k`` and ``v`` are a part of the keys that the rows saw (a block of ring attention), the
backward of that part takes the ``lse`` of all keys and their ``delta = rowsum(dout out) - dlse``,
``[B, H, Sq]`` as lse, which a part cannot know; ``dlse`` and ``out`` are not read then.

Letters: B = batch, Sq / Sk = query rows / keys, H = query heads, N = KV heads, D = head dim of q
and k, E = head dim of v and out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcp_kernels._op import call, define_op
from mcp_kernels.ops.attention_composite import attention_composite, second_gradients
from mcp_kernels.ops.attention_mask import AttentionOptions
from mcp_kernels.ops.attention_reference import attention_backward, attention_forward
from mcp_kernels.ops.attention_scores import AttentionInputs
from mcp_kernels.ops.attention_vmap import vmap_backward, vmap_forward
from mcp_kernels.saved import keep_exact

_OPTIONS = (
    "float softmax_scale, int window_left, int window_right, bool top_left, float softcap,"
    " float dropout_p"
)
_FORWARD = (
    "flash_attn(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? alibi_slopes, Tensor? sink,"
    f" Tensor? rng, {_OPTIONS}) -> (Tensor out, Tensor lse)"
)
_BACKWARD = (
    "flash_attn_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out,"
    " Tensor lse, Tensor? bias, Tensor? alibi_slopes, Tensor? sink, Tensor? rng, bool needs_dbias,"
    f" {_OPTIONS}, Tensor? delta=None)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)"
)


def lse_dtype(q: Tensor) -> torch.dtype:
    """float32, or float64 for float64 inputs."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def split_delta(options: Sequence[Any]) -> tuple[tuple[Any, ...], Tensor | None]:
    """The options of a backward call and what follows them: the dispatcher leaves None out."""
    count = len(AttentionOptions._fields)
    return tuple(options[:count]), options[count] if len(options) > count else None


def make_inputs(
    qkv: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    rng: Tensor | None,
    options: AttentionOptions,
    first_batch: int = 0,
) -> AttentionInputs:
    """The op's arguments with bias and slopes expanded to their full shapes (no copy)."""
    q, k, v = qkv
    batch, num_rows, heads, _ = q.shape
    return AttentionInputs(
        q,
        k,
        v,
        None if bias is None else bias.expand(batch, heads, num_rows, k.shape[1]),
        None if alibi_slopes is None else alibi_slopes.expand(batch, heads),
        sink,
        rng,
        options,
        first_batch,
    )


def _forward_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    rng: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    out, lse = _forward_fake(q, k, v)
    inputs = make_inputs((q, k, v), bias, alibi_slopes, sink, rng, AttentionOptions(*options))
    attention_forward(inputs, out, lse)
    return out, lse


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, num_rows, heads, _ = q.shape
    out = q.new_empty(batch, num_rows, heads, v.shape[3])
    return out, q.new_empty(batch, heads, num_rows, dtype=lse_dtype(q))


def _forward_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, slopes, sink, rng, *options = inputs
    ctx.set_materialize_grads(False)
    ctx.options = options
    keep_exact(output[1])
    ctx.save_for_backward(q, k, v, *output, bias, slopes, sink, rng)


def _forward_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, bias, slopes, sink, rng = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    needs = ctx.needs_input_grad
    refuse_slope_gradients("flash_attn", needs=needs[4])
    grads = call(
        torch.ops.mcp_kernels.flash_attn_bwd.default,
        dout,
        dlse,
        q,
        k,
        v,
        out,
        lse,
        bias,
        slopes,
        sink,
        rng,
        needs[3],
        *ctx.options,
    )
    dq, dk, dv, dbias, dsink = (
        grad if need else None for grad, need in zip(grads, (*needs[:4], needs[5]), strict=True)
    )
    return dq, dk, dv, dbias, None, dsink, None, *([None] * len(ctx.options))


def _backward_ref(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    bias, slopes, sink, rng, needs_dbias, *options = rest
    options, delta = split_delta(options)
    inputs = make_inputs((q, k, v), bias, slopes, sink, rng, AttentionOptions(*options))
    dbias = None
    if needs_dbias:
        dbias = torch.zeros(bias.shape, dtype=inputs.compute_dtype, device=bias.device)
    dq, dk, dv, dsink = attention_backward(inputs, dout, dlse, lse, dbias, delta)
    dsink = q.new_empty(0) if dsink is None else dsink.to(sink.dtype)
    return dq, dk, dv, q.new_empty(0) if dbias is None else dbias.to(bias.dtype), dsink


def _backward_fake(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    bias, _, sink, _, needs_dbias, *_ = rest
    dbias = bias.new_empty(bias.shape) if needs_dbias else q.new_empty(0)
    dsink = q.new_empty(0) if sink is None else sink.new_empty(sink.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dbias, dsink


def refuse_slope_gradients(op: str, *, needs: bool) -> None:
    """ALiBi's slopes are constants; a transform around others hides from the border what it wants.

    Raises:
        ValueError: their gradient is asked for.
    """
    if needs:
        raise ValueError(
            f"{op}: alibi_slopes must not require grad, they have no gradient; "
            "pass slopes.detach(), or a bias"
        )


def refuse_second_gradients(op: str, *, is_part: bool) -> None:
    """A part of the keys alone has no second derivative.

    Raises:
        RuntimeError: the call was given its ``delta``.
    """
    if is_part:
        raise RuntimeError(
            f"{op}: delta must be None to be differentiated again, got a tensor; "
            "differentiate attention over all keys"
        )


def _backward_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    dout, dlse, q, k, v, _, _, bias, slopes, sink, rng, ctx.needs_dbias, *options = inputs
    ctx.set_materialize_grads(False)
    ctx.options, delta = split_delta(options)
    ctx.is_part = delta is not None
    ctx.save_for_backward(dout, dlse, q, k, v, bias, slopes, sink, rng)


def _backward_backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    refuse_second_gradients("flash_attn_bwd", is_part=ctx.is_part)
    dout, dlse, q, k, v, bias, slopes, sink, rng = ctx.saved_tensors
    options = AttentionOptions(*ctx.options)

    def composite(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sink: Tensor) -> Any:
        return attention_composite(make_inputs((q, k, v), bias, slopes, sink, rng, options))

    d_dout, d_dlse, dq, dk, dv, dbias, dsink = second_gradients(
        composite,
        (q, k, v, bias, sink),
        dout,
        dlse,
        (True, True, True, ctx.needs_dbias, True),
        grads,
    )
    rest = [None] * (3 + len(ctx.options))
    return d_dout, d_dlse, dq, dk, dv, None, None, dbias, None, dsink, *rest


define_op(
    _FORWARD,
    reference=_forward_ref,
    fake=_forward_fake,
    backward=_forward_backward,
    setup_context=_forward_setup,
    vmap=vmap_forward,
)
define_op(
    _BACKWARD,
    reference=_backward_ref,
    fake=_backward_fake,
    backward=_backward_backward,
    setup_context=_backward_setup,
    vmap=vmap_backward,
)
