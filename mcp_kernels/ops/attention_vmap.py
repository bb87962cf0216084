"""Attention under ``torch.vmap``: the mapped dimension is folded into the batch.

What a call shares over its batch cannot be folded: a sink, whose gradient is one sum, and the seed
of a dropout mask, which counts batch entries. Such a call runs sample by sample.

Letters: N = samples of the map, B = batch, H = heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcp_kernels._transforms import check_samples, loop

_NUM_OPTIONS = 6


def vmap_forward(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
    """The rule of ``flash_attn``."""
    q, k, v, bias, slopes, sink, rng, *options = args
    if in_dims[5] is not None or rng is not None:
        return loop(torch.ops.mcp_kernels.flash_attn, info, in_dims, args)
    fold = _Fold("flash_attn", info)
    qkv = [fold(t, dim) for t, dim in zip((q, k, v), in_dims[:3], strict=True)]
    batch = qkv[0].shape[0] // info.batch_size
    out, lse = torch.ops.mcp_kernels.flash_attn(
        *qkv,
        fold.expanded(bias, in_dims[3], batch, 4),
        fold.expanded(slopes, in_dims[4], batch, 2),
        sink,
        rng,
        *options,
    )
    return (fold.undo(out), fold.undo(lse)), (0, 0)


def vmap_backward(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
    """The rule of ``flash_attn_bwd``."""
    dout, dlse, *tensors = args[:7]
    bias, slopes, sink, rng, needs_dbias, *options = args[7:]
    is_part = any(value is not None for value in options[_NUM_OPTIONS:])
    options = options[:_NUM_OPTIONS]
    if is_part or sink is not None or rng is not None:
        return loop(torch.ops.mcp_kernels.flash_attn_bwd, info, in_dims, args)
    fold = _Fold("flash_attn", info)
    folded = [fold(t, dim) for t, dim in zip(tensors, in_dims[2:7], strict=True)]
    batch = folded[0].shape[0] // info.batch_size
    dq, dk, dv, dbias, dsink = torch.ops.mcp_kernels.flash_attn_bwd(
        fold(dout, in_dims[0]),
        None if dlse is None else fold(dlse, in_dims[1]),
        *folded,
        fold.expanded(bias, in_dims[7], batch, 4),
        fold.expanded(slopes, in_dims[8], batch, 2),
        sink,
        rng,
        needs_dbias,
        *options,
    )
    grads = [fold.undo(t) for t in (dq, dk, dv)]
    if not needs_dbias:
        return (*grads, dbias, dsink), (0, 0, 0, None, None)
    dbias = fold.undo(dbias)  # [N, B, ...]
    bias_batch = bias.shape[0] if in_dims[7] is None else bias.movedim(in_dims[7], 0).shape[1]
    if bias_batch != batch:
        dbias = dbias.sum(1, keepdim=True)
    return (*grads, dbias, dsink), (0, 0, 0, 0, None)


class _Fold:
    """Moves the mapped dimension in front of the batch, and back."""

    def __init__(self, op: str, info: Any) -> None:
        check_samples(op, info)
        self.num_samples: int = info.batch_size

    def _in_front(self, tensor: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return tensor.expand(self.num_samples, *tensor.shape)
        return tensor.movedim(dim, 0)

    def __call__(self, tensor: Tensor, dim: int | None) -> Tensor:
        """``[B, ...]`` of each sample as ``[N * B, ...]``."""
        return self._in_front(tensor, dim).flatten(0, 1)

    def expanded(
        self, tensor: Tensor | None, dim: int | None, batch: int, rank: int
    ) -> Tensor | None:
        """The same for a tensor that may lack the batch dimension or share it."""
        if tensor is None:
            return None
        tensor = self._in_front(tensor, dim)
        while tensor.dim() < rank + 1:
            tensor = tensor.unsqueeze(1)
        return tensor.expand(self.num_samples, batch, *tensor.shape[2:]).flatten(0, 1)

    def undo(self, tensor: Tensor) -> Tensor:
        """``[N * B, ...]`` as ``[N, B, ...]``."""
        return tensor.unflatten(0, (self.num_samples, -1))
