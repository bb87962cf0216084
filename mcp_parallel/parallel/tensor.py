"""Tensor parallelism: which dim of each weight is split, and the region that talks over it.

Source: Shoeybi et al., "Megatron-LM" (2019); sequence parallelism: Korthikanti et al. (2022).
The matmuls with their collectives are ``mcp_kernels`` ops; weights here are plain local shards
whose place in the whole is kept in ``Shard`` records (see ``shards.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import embedding, linear, pad

from mcp_kernels import (
    all_gather_matmul,
    all_reduce,
    copy_to_group,
    matmul_all_reduce,
    matmul_reduce_scatter,
    reduce_scatter,
)
from mcp_parallel.layout import split_dim
from mcp_parallel.model.region import IGNORED

SEQUENCE_DIM = 1

# Last part of a parameter's name -> the dim that tensor parallelism splits. Column-parallel weights
# [out, in] split rows, row-parallel ones columns, vocabulary tables rows; norms are whole.
SPLIT_DIM = {
    "wq": 0,
    "wk": 0,
    "wv": 0,
    "wo": 1,
    "w1": 0,
    "w3": 0,
    "w2": 1,
    "embed": 0,
    "head": 0,
}


def split_dim_of(name: str) -> int | None:
    """The dim of parameter ``name`` that is split over tp; None for a replicated parameter."""
    return SPLIT_DIM.get(name.rsplit(".", 1)[-1])


class TensorRegion:
    """``Region`` over a tensor-parallel group, with or without sequence parallelism."""

    def __init__(
        self, group: dist.ProcessGroup, vocab_size: int, *, sequence_parallel: bool
    ) -> None:
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.vocab_start, _ = split_dim(vocab_size, group.size(), group.rank())

    def enter(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """See ``Region.enter``; gathers the sequence first under sequence parallelism."""
        if self.sequence_parallel:
            return list(
                all_gather_matmul(x, list(weights), group=self.group, gather_dim=SEQUENCE_DIM)
            )
        x = copy_to_group(x, group=self.group)
        return [linear(x, weight) for weight in weights]

    def leave(self, x: Tensor, weight: Tensor) -> Tensor:
        """See ``Region.leave``; scatters the sequence under sequence parallelism."""
        if self.sequence_parallel:
            return matmul_reduce_scatter(x, weight, group=self.group, scatter_dim=SEQUENCE_DIM)
        return matmul_all_reduce(x, weight, group=self.group)

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        """See ``Region.embed``; each rank looks up the rows it holds, the sum completes them."""
        local = tokens - self.vocab_start
        elsewhere = (local < 0) | (local >= table.shape[0])
        if table.shape[0] == 0:
            # More ranks than rows: a row that nobody asks for keeps this rank in the backward.
            table = pad(table, (0, 0, 0, 1))
        rows = embedding(local.masked_fill(elsewhere, 0), table)
        rows = rows.masked_fill(elsewhere[..., None], 0)
        if self.sequence_parallel:
            return reduce_scatter(rows, group=self.group, scatter_dim=SEQUENCE_DIM)
        return all_reduce(rows, group=self.group)

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """See ``Region.cross_entropy``; ``logits`` hold this rank's part of the vocabulary."""
        if logits.shape[-1] == 0:
            logits = pad(logits, (0, 1), value=-math.inf)
        return _VocabParallelCrossEntropy.apply(
            logits.flatten(0, 1), targets.flatten(), self.vocab_start, self.group
        )  # pyright: ignore[reportReturnType]


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy over logits whose vocabulary dim is split over a group.

    loss_n = log(sum_v exp(z_nv - m_n)) + m_n - z_n,target; two collectives: a max over N values and
    a sum over 2 N. Gradient: softmax - one_hot on the local columns, without communication.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocab_start: int, group: dist.ProcessGroup
    ) -> Tensor:
        top = logits.amax(dim=1)  # [N]
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - top[:, None]
        column = targets - vocab_start
        elsewhere = (column < 0) | (column >= logits.shape[1])
        column = column.masked_fill(elsewhere, 0)
        sums = torch.empty(2, len(targets), dtype=logits.dtype, device=logits.device)
        sums[0] = shifted.gather(1, column[:, None])[:, 0].masked_fill_(elsewhere, 0)
        exp = shifted.exp_()
        torch.sum(exp, dim=1, out=sums[1])
        dist.all_reduce(sums, group=group)
        target_logit, total = sums
        counted = targets != IGNORED
        ctx.save_for_backward(exp, total, column, elsewhere, counted)
        return (total.log() - target_logit).masked_fill_(~counted, 0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        exp, total, column, elsewhere, counted = ctx.saved_tensors
        scale = grads[0] * counted  # [N], zero where the target is ignored
        grad = exp * (scale / total)[:, None]
        here = (scale * ~elsewhere).neg_()
        grad.scatter_add_(1, column[:, None], here[:, None])
        return grad, None, None, None
