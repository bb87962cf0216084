"""Attention as explicit formulas, forward and backward: the definition of the attention ops.

    S  = softmax_scale * q k^T           S = c tanh(S / c) with a softcap c
    S += bias - slope |i + offset - j|   S = -inf where the window or a bool bias hides the key
    lse = log(sum_j exp S_j + exp sink)  P = exp(S - lse)
    out = (P * keep / (1 - p)) v

    dP = dout v^T * keep / (1 - p)       delta = rowsum(P * dP) - dlse
    dS = P * (dP - delta)                dsink = -sum_rows exp(sink - lse) * delta
    dbias = dS                           dS *= softmax_scale * (1 - tanh^2)
    dq = dS k     dk = dS^T q            dv = (P * keep / (1 - p))^T dout

rowsum(P * dP) is rowsum(dout * out) without the rounding of ``out``: a block holds whole rows, so
it costs one more pass over the block and halves the error of 16-bit gradients.

A row that sees no key has out = 0 and lse = -inf (with a sink: lse = sink), and no gradient.
Sums run in float32, in float64 for float64. Exponentials are powers of two, with log2(e) folded
into the scale: the vector exp that torch takes on CPUs is 5 to 50 times slower on -inf and on
results that underflow, exp2 is not.

Source: Dao, "FlashAttention-2" (2023), section 3.1, without its rescaling: a block sees all its
keys at once. Letters: see ``attention_scores.py``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mcp_kernels.ops.attention_blocks import Chunk, Plan
from mcp_kernels.ops.attention_scores import (
    AttentionInputs,
    add_bias_gradient,
    add_keys,
    drop_factors,
    exponentials_,
    probabilities_,
    product,
    scores,
    scratch_for,
    store_row_values,
    store_rows,
    take_keys,
    take_row_values,
    take_rows,
)


def attention_forward(inputs: AttentionInputs, out: Tensor, lse: Tensor) -> None:
    """Fill ``out`` ``[B, Sq, H, E]`` (q's dtype) and ``lse`` ``[B, H, Sq]`` (compute dtype)."""
    plan = inputs.plan()
    if plan.num_keys == 0 or lse.numel() == 0:
        out.zero_()
        lse.copy_(_empty_lse(inputs, lse))
        return
    q_scale = inputs.options.softmax_scale * inputs.unit
    for chunk in plan.chunks():
        k_nKD, v_nKE = take_keys(inputs.k, inputs, chunk), take_keys(inputs.v, inputs, chunk)
        scratch = scratch_for(inputs, plan, chunk)
        for block in plan.blocks(chunk, inputs.bias):
            q_nMD = take_rows(inputs.q, inputs, chunk, block) * q_scale
            s, _ = scores(inputs, plan, chunk, block, q_nMD, k_nKD, scratch)
            row_max, row_sum = exponentials_(inputs, chunk, s)
            block_lse = torch.add(row_sum.log(), row_max, alpha=1 / inputs.unit)
            store_row_values(block_lse, lse, chunk, block)
            if inputs.rng is not None:
                s.mul_(drop_factors(inputs, chunk, block, s))
            row_sum.masked_fill_(row_sum == 0, 1.0)  # a row that sees no key: 0 / 1
            o_nME = torch.bmm(s.flatten(1, 2), v_nKE[:, block.key_index])
            store_rows(o_nME.div_(row_sum.flatten(1, 2)), out, chunk, block)


def attention_backward(
    inputs: AttentionInputs,
    dout: Tensor,
    dlse: Tensor | None,
    lse: Tensor,
    dbias: Tensor | None,
    given_delta: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients (dq, dk, dv, dsink): contiguous, of the dtypes of q, k and v, and of lse's.

    Args:
        inputs: as in forward.
        dout: gradient of ``out``.
        dlse: gradient of ``lse``, or None.
        lse: result of forward.
        dbias: where given, the bias's gradient is added to it; of size 1 where the bias was
            broadcast.
        given_delta: where ``inputs`` hold a part of the keys that ``lse`` is of: rowsum(P dP) -
            dlse over all of them, shaped like lse.
    """
    plan = inputs.plan(dout)
    dq = torch.zeros(inputs.q.shape, dtype=inputs.q.dtype, device=inputs.q.device)
    dk, dv = (
        torch.zeros(t.shape, dtype=inputs.compute_dtype, device=t.device)
        for t in (inputs.k, inputs.v)
    )
    # A row that saw no key: with lse = +inf all its probabilities are 0, without 0 * inf.
    is_dead = lse == -math.inf
    base = (lse * inputs.unit).masked_fill_(is_dead, math.inf)
    if given_delta is not None:
        delta = given_delta.masked_fill(is_dead, 0.0)
    else:
        delta = torch.zeros_like(lse) if dlse is None else dlse.masked_fill(is_dead, 0.0).neg_()
    if plan.num_keys and lse.numel():
        for chunk in plan.chunks():
            row_terms = (dout, delta, base, given_delta is None)
            _backward_chunk(inputs, plan, chunk, row_terms, (dq, dk, dv, dbias))
    dsink = None
    if inputs.sink is not None:
        p_sink = (inputs.sink.to(lse.dtype)[None, :, None] - lse).exp_()
        dsink = p_sink.mul_(delta).sum((0, 2)).neg_()
    return dq, dk.to(inputs.k.dtype), dv.to(inputs.v.dtype), dsink


def _backward_chunk(
    inputs: AttentionInputs,
    plan: Plan,
    chunk: Chunk,
    row_terms: tuple[Tensor, Tensor, Tensor, bool],
    grads: tuple[Tensor, Tensor, Tensor, Tensor | None],
) -> None:
    """Add one chunk's part to (dq, dk, dv, dbias), given (dout, delta, lse * unit).

    Where the fourth term says so, rowsum(P dP) is still to be added to delta, in place.
    """
    dout, delta, base, sums_delta = row_terms
    dq, dk, dv, dbias = grads
    scale = inputs.options.softmax_scale
    k_nKD, v_nKE = take_keys(inputs.k, inputs, chunk), take_keys(inputs.v, inputs, chunk)
    dk_nKD, dv_nKE = torch.zeros_like(k_nKD), torch.zeros_like(v_nKE)
    scratch_p, scratch_ds = scratch_for(inputs, plan, chunk), scratch_for(inputs, plan, chunk)
    for block in plan.blocks(chunk, inputs.bias):
        keys = block.key_index
        q_nMD = take_rows(inputs.q, inputs, chunk, block) * (scale * inputs.unit)
        do_nME = take_rows(dout, inputs, chunk, block)
        p, tanh = scores(inputs, plan, chunk, block, q_nMD, k_nKD, scratch_p)
        probabilities_(inputs, p, take_row_values(base, chunk, block, p))
        ds = product(do_nME, v_nKE[:, keys], len(block.rows), scratch_ds)
        dropped = p
        if inputs.rng is not None:
            factors = drop_factors(inputs, chunk, block, p)
            ds.mul_(factors)
            dropped = p * factors
        _accumulate(dv_nKE, keys, dropped.flatten(1, 2), do_nME)
        row_delta = take_row_values(delta, chunk, block, ds)
        ds.mul_(p)
        if sums_delta:
            row_delta = row_delta + ds.sum(-1, keepdim=True)
            store_row_values(row_delta, delta, chunk, block)
        ds.addcmul_(p, row_delta, value=-1)
        if dbias is not None:
            add_bias_gradient(dbias, ds, chunk, block)
        if tanh is not None:
            ds.mul_(tanh.square_().neg_().add_(1.0))
        ds_nMK = ds.flatten(1, 2)
        store_rows(torch.bmm(ds_nMK, k_nKD[:, keys]).mul_(scale), dq, chunk, block)
        _accumulate(dk_nKD, keys, ds_nMK, q_nMD)
    add_keys(dk_nKD.mul_(1 / inputs.unit), dk, chunk)
    add_keys(dv_nKE, dv, chunk)


def _empty_lse(inputs: AttentionInputs, lse: Tensor) -> Tensor:
    """What ``lse`` is on rows that see no key."""
    if inputs.sink is None:
        return lse.new_full((), -math.inf)
    return inputs.sink.to(lse.dtype)[None, :, None]


def _accumulate(total_nKX: Tensor, keys: slice | Tensor, a_nMK: Tensor, b_nMX: Tensor) -> None:
    """Add ``a^T b`` to the rows ``keys`` of ``total``."""
    if isinstance(keys, slice):
        total_nKX[:, keys].baddbmm_(a_nMK.transpose(1, 2), b_nMX)
    else:
        total_nKX[:, keys] += torch.bmm(a_nMK.transpose(1, 2), b_nMX)
