"""Attention of some rows over some of the keys that they see, and its backward.

Rows and keys are ``[B, S, H, K]``. Where documents restrict who sees whom, what is left of a block
is a list of rectangles and triangles, which one varlen call of the flash kernel runs: the batch is
laid end to end, and rows or keys that meet nobody are sequences without the other side.

Letters: B = batch, Sq / Sk = rows / keys of the block, H = query heads, N = KV heads, K = head
size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcp_kernels import flash_attn_func, flash_attn_varlen_func
from mcp_kernels.ops.attention_check import make_options


class Bounds(NamedTuple):
    """Sequences of a varlen call over a block whose batch is laid end to end."""

    rows: Tensor
    """``[n + 1]`` int64: 0, then where the rows of each sequence end."""
    keys: Tensor
    """``[n + 1]``, the same of its keys."""


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, bounds: Bounds | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of the rows over these keys alone.

    Args:
        q: ``[B, Sq, H, K]``.
        k: ``[B, Sk, N, K]``.
        v: ``[B, Sk, N, K]``.
        causal: hide later keys, rows and keys ending together.
        bounds: who meets whom; None is every row of a sample and every key of it.

    Returns:
        ``(out [B, Sq, H, K], lse [B, H, Sq])``; 0 and -inf for a row that sees none of these keys.
    """
    if bounds is None:
        return flash_attn_func(q, k, v, causal=causal, return_lse=True)
    out, lse = flash_attn_varlen_func(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        bounds.rows,
        bounds.keys,
        q.shape[1],
        k.shape[1],
        causal=causal,
        return_lse=True,
    )
    return out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)


class Results(NamedTuple):
    """What a row's backward needs of its attention over all keys."""

    dout: Tensor
    """``[B, Sq, H, K]``."""
    out: Tensor
    """``[B, Sq, H, K]``."""
    lse: Tensor
    """``[B, H, Sq]``."""
    delta: Tensor
    """rowsum(dout out), ``[B, H, Sq]``."""

    def of_rows(self, rows: slice) -> Results:
        """Those of some rows."""
        lse, delta = (t[:, :, rows].contiguous() for t in (self.lse, self.delta))
        return Results(self.dout[:, rows], self.out[:, rows], lse, delta)


def results_of(dout: Tensor, out: Tensor, lse: Tensor) -> Results:
    """``Results`` with delta computed, in the dtype of ``lse``."""
    delta = (dout.to(lse.dtype) * out).sum(-1).transpose(1, 2)
    return Results(dout, out, lse, delta)


def attend_block_backward(
    q: Tensor, k: Tensor, v: Tensor, results: Results, *, causal: bool, bounds: Bounds | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) that flow through this block, shaped and typed as q, k and v.

    Args:
        q: as in ``attend_block``, like all that are not named here.
        k: as there.
        v: as there.
        results: of the rows over all their keys, not over this block alone.
        causal: as there.
        bounds: as there.
    """
    options = make_options(
        "attend_block",
        q.shape[-1],
        dropout_p=0.0,
        softmax_scale=None,
        causal=causal,
        window_size=(-1, -1),
        softcap=0.0,
        causal_align="bottom_right",
    )
    dout, out, lse, delta = results
    ops: Any = torch.ops.mcp_kernels
    if bounds is None:
        terms = (None, None, None, None, False, *options)
        dq, dk, dv, _, _ = ops.flash_attn_bwd(dout, None, q, k, v, out, lse, *terms, delta)
        return dq, dk, dv
    flat = [t.flatten(0, 1) for t in (dout, q, k, v, out)]
    by_head = [t.transpose(0, 1).flatten(1, 2) for t in (lse, delta)]
    dq, dk, dv, _ = ops.flash_attn_varlen_bwd(
        flat[0], None, *flat[1:], by_head[0], *bounds, None, None, None, *options, by_head[1]
    )
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)
