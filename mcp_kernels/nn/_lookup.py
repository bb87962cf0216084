"""Rows of a table, with a gradient that 16-bit tables can be trained with on CPU.

torch's CPU backward of ``embedding`` adds a table's gradients up in the table's own format: of a
bfloat16 table the sum for a frequent token stops at 256 times its terms. Here the sum is float32
and rounded once, as on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding


class _NarrowLookup(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(tokens: Tensor, table: Tensor, padding_idx: int | None) -> Tensor:
        return embedding(tokens, table, padding_idx)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        tokens, table, ctx.padding_idx = inputs
        ctx.save_for_backward(tokens)
        ctx.table_shape = table.shape

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        (tokens,) = ctx.saved_tensors
        total = torch.zeros(ctx.table_shape, dtype=torch.float32, device=grads[0].device)
        total = total.index_add(0, tokens.flatten(), grads[0].flatten(0, -2).float())
        if ctx.padding_idx is not None:
            total[ctx.padding_idx] = 0
        return None, total.to(grads[0].dtype), None


def lookup(tokens: Tensor, table: Tensor, padding_idx: int | None = None) -> Tensor:
    """``embedding(tokens, table, padding_idx)``, its gradient summed in float32 at least.

    Args:
        tokens: int64 ``[...]``, below V.
        table: ``[V, D]``.
        padding_idx: row that gets no gradient, from 0.

    Returns:
        ``[..., D]``.

    Cost: of a 16-bit table on CPU one transient float32 table in backward.
    """
    if table.is_cpu and table.itemsize == 2 and not torch.compiler.is_compiling():
        return _NarrowLookup.apply(tokens, table, padding_idx)  # pyright: ignore[reportReturnType]
    return embedding(tokens, table, padding_idx)
