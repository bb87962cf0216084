"""Rotary position embedding, from tables of cosines and sines.

    a, b = x[j], x[j + K / 2]              a pair of one head
    y[j], y[j + K / 2] = a cos - b sin, b cos + a sin

``rotary`` is the op that models train with; ``rotate`` serves attention over a KV cache, which
rotates parts of heads and neighbouring pairs as well. A rotation's transpose is the rotation back,
so the op's gradient is the op with ``back`` turned over, and keeps no activation. 16-bit heads are
turned in float32 and rounded once: angles in 16 bits would be off by whole turns at long positions.

Source: Su et al., "RoFormer" (2021), section 3.4.2.
Letters: B = batch, S = rows, H = heads of q, N = of k, K = D = head dim, R = rotated dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcp_kernels._op import call, define_op
from mcp_kernels._transforms import Result, check_samples, in_front, loop
from mcp_kernels.ops._rows_check import check_floating, compute_dtype
from mcp_kernels.saved import keep_exact


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn each pair (j, j + K / 2) of queries and keys by its position's angle.

    Any number of times differentiable in q and k; tables are constants.

    Args:
        q: ``[B, S, H, K]`` with K even, float64, float32, bfloat16 or float16, of any strides.
        k: ``[B, S, N, K]``, of q's dtype.
        cos: ``[S, K / 2]`` float32 (float64 for float64), cosine of each pair's angle.
        sin: ``[S, K / 2]``, as ``cos``.

    Returns:
        Two new contiguous tensors like ``q`` and ``k``.

    Raises:
        TypeError: a dtype is none of these.
        ValueError: shapes do not fit.

    Cost: on CPU one pass over memory, 8 bytes an element in float32, forward and backward each.
    """
    check_floating("rotary", "q", q)
    if q.dim() != 4 or q.shape[3] % 2 or q.shape[3] == 0:
        raise ValueError(f"rotary: q must be [B, S, H, K] with K even, got {list(q.shape)}")
    if k.dim() != 4 or (*k.shape[:2], k.shape[3]) != (*q.shape[:2], q.shape[3]):
        raise ValueError(
            f"rotary: k must be [B, S, N, K] as q {list(q.shape)} is, got {list(k.shape)}"
        )
    if k.dtype != q.dtype:
        raise TypeError(f"rotary: k must be {q.dtype} as q is, got {k.dtype}")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape != (q.shape[1], q.shape[3] // 2):
            raise ValueError(
                f"rotary: {name} must be [S, K / 2] = {[q.shape[1], q.shape[3] // 2]}, got "
                f"{list(table.shape)}"
            )
        if table.dtype != compute_dtype(q):
            raise TypeError(
                f"rotary: {name} must be {compute_dtype(q)} for {q.dtype}, got {table.dtype}"
            )
    return torch.ops.mcp_kernels.rotary(q, k, cos, sin, False)


def _rotary_ref(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool
) -> tuple[Tensor, Tensor]:
    return _turn(q, cos, sin, back), _turn(k, cos, sin, back)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    cos_S1P, sin_S1P = cos[:, None], sin[:, None]
    first, second = x.to(cos.dtype).chunk(2, dim=-1)  # [B, S, H, K / 2]
    if back:
        turned = (first * cos_S1P + second * sin_S1P, second * cos_S1P - first * sin_S1P)
    else:
        turned = (first * cos_S1P - second * sin_S1P, second * cos_S1P + first * sin_S1P)
    return torch.cat(turned, dim=-1).to(x.dtype).contiguous()


def _rotary_fake(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _rotary_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cos, sin, ctx.back = inputs
    for table in (cos, sin):  # an error in an angle is one in every head
        keep_exact(table)
    ctx.save_for_backward(cos, sin)


def _rotary_backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    if any(ctx.needs_input_grad[2:4]):
        raise ValueError(
            "rotary: cos and sin must not require grad, tables have no gradient; detach() them, "
            "or rotate with torch's own operations to learn the angles"
        )
    cos, sin = ctx.saved_tensors
    op = torch.ops.mcp_kernels.rotary.default
    return *call(op, dq, dk, cos, sin, not ctx.back), None, None, None


def _rotary_vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> Result:
    q, k, cos, sin, back = args
    if in_dims[2] is not None or in_dims[3] is not None:
        return loop(torch.ops.mcp_kernels.rotary, info, in_dims, args)
    check_samples("rotary", info)
    samples = info.batch_size
    pair = [in_front(t, d, samples).flatten(0, 1) for t, d in zip((q, k), in_dims, strict=False)]
    turned = torch.ops.mcp_kernels.rotary(*pair, cos, sin, back)
    return tuple(t.unflatten(0, (samples, -1)) for t in turned), (0, 0)


define_op(
    "rotary(Tensor q, Tensor k, Tensor cos, Tensor sin, bool back) -> (Tensor, Tensor)",
    reference=_rotary_ref,
    fake=_rotary_fake,
    backward=_rotary_backward,
    setup_context=_rotary_setup,
    vmap=_rotary_vmap,
)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: range, is_interleaved: bool) -> Tensor:
    """``x`` with its first R dims rotated by the angles of ``positions``.

    Args:
        x: ``[B, S, H, D]``.
        cos: ``[P, R / 2]``, cosine of each pair's angle at each position.
        sin: ``[P, R / 2]``.
        positions: of the S rows, or one position for all of them.
        is_interleaved: pairs are (0, 1), (2, 3), ..; else (0, R / 2), (1, R / 2 + 1), ..

    Returns:
        A new tensor of x's shape and dtype, computed in float32 (float64 for float64).

    Raises:
        ValueError: a position is past the table.
    """
    if positions.stop > cos.shape[0]:
        raise ValueError(
            f"rotate: rotary_cos must have {positions.stop} positions, got {cos.shape[0]}"
        )
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    at = slice(positions.start, positions.stop)
    cos_S1P, sin_S1P = (t[at, None].to(dtype) for t in (cos, sin))
    rotated_dims = 2 * cos.shape[1]
    head = x[..., :rotated_dims].to(dtype)
    if is_interleaved:
        first, second = head[..., 0::2], head[..., 1::2]
    else:
        first, second = head.chunk(2, dim=-1)
    turned = (
        first * cos_S1P - second * sin_S1P,
        first * sin_S1P + second * cos_S1P,
    )
    if is_interleaved:
        joined = torch.stack(turned, dim=-1).flatten(-2)
    else:
        joined = torch.cat(turned, dim=-1)
    return torch.cat([joined.to(x.dtype), x[..., rotated_dims:]], dim=-1)
