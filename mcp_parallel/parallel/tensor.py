"""Tensor parallelism of the model: how each layer is cut, and the loss over cut logits.

Source: Shoeybi et al., "Megatron-LM" (2019); sequence parallelism: Korthikanti et al. (2022).
Layers become those of ``mcp_kernels.nn``, with DTensor weights: where a weight's part lies in the
whole is read from the weight itself (see ``shards.py``) and written down nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from mcp_kernels.nn import ColumnParallel, RowParallel, parallelize
from mcp_kernels.nn.parallel_style import TensorParallelStyle
from mcp_parallel.layout import split_dim
from mcp_parallel.model.loss import IGNORED, token_loss
from mcp_parallel.model.stage import SharesSequence, StageModel
from mcp_parallel.parallel.mesh import Mesh

TokenLoss = Callable[[Tensor, Tensor], Tensor]
"""(logits ``[..., V]``, targets ``[...]``) -> summed loss ``[]``; V is this rank's share."""

# Last part of a layer's name: whose input features are cut. All other layers are cut by outputs,
# attention by whole heads, which ``check`` has seen to.
ROW_PARALLEL = ("wo", "w2", "embed")


def cut_layers(model: StageModel, mesh: Mesh, seq_len: int) -> None:
    """Lay the layers of ``model`` over this rank's tensor-parallel group, in place.

    ``seq_len`` is the length of every sequence that the group is given; ``tp`` need not divide it.

    Norms are replicated. Under sequence parallelism each rank's gradient of a norm covers its own
    part of the sequence: ``Gradients`` sums those once a step.
    """
    if mesh.layout.tp == 1:
        return
    assert mesh.device_mesh is not None
    is_cut = mesh.layout.sequence_parallel
    uneven = seq_len if is_cut and seq_len % mesh.layout.tp else None
    column = ColumnParallel(sequence_parallel=is_cut, sequence_size=uneven)
    row = RowParallel(sequence_parallel=is_cut, sequence_size=uneven)
    plan: dict[str, TensorParallelStyle] = {
        name: row if name.rpartition(".")[2] in ROW_PARALLEL else column
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding)
    }
    plan |= {name: ColumnParallel() for name in model.whole_input & plan.keys()}
    parallelize(model, plan, mesh.device_mesh["tp"])
    if is_cut:
        for module in model.modules():
            if isinstance(module, SharesSequence):
                module.sequence_group = mesh.group("tp")


def build_token_loss(vocab_size: int, mesh: Mesh) -> TokenLoss:
    """``token_loss`` for logits as the model leaves them on this rank."""
    group = mesh.group("tp")
    if group is None:
        return token_loss
    start, _ = split_dim(vocab_size, group.size(), group.rank())
    return partial(vocab_parallel_loss, vocab_start=start, group=group)


def vocab_parallel_loss(
    logits: Tensor, targets: Tensor, *, vocab_start: int, group: dist.ProcessGroup
) -> Tensor:
    """``token_loss`` over logits whose vocabulary is cut over ``group``.

    Args:
        logits: ``[..., V]``, this rank's part of the vocabulary; V may be 0. Of 16-bit ones the
            loss is computed in fp32.
        targets: int64 ``[...]``, numbers of the whole vocabulary.
        vocab_start: first of this rank's part.
        group: the ranks that share the vocabulary.

    Returns:
        ``[]``, the same on every rank.

    Cost: two all-reduces, of ``B S`` and ``2 B S`` values.
    """
    if logits.shape[-1] == 0:
        logits = pad(logits, (0, 1), value=-math.inf)
    return _VocabParallelCrossEntropy.apply(
        logits.flatten(0, -2), targets.flatten(), vocab_start, group
    )  # pyright: ignore[reportReturnType]


def vocab_parallel_argmax(
    logits: Tensor, vocab_size: int, group: dist.ProcessGroup | None
) -> Tensor:
    """The most likely entry of the whole vocabulary; of equal ones the first, in every layout.

    Args:
        logits: ``[N, V]``, this rank's part of the vocabulary; V may be 0.
        vocab_size: entries of the whole.
        group: the ranks that it is cut over; None where ``logits`` are whole.

    Returns:
        int64 ``[N]``, the same on every rank.

    Cost: two all-reduces of N values.
    """
    if group is None:
        return logits.argmax(1)
    start, _ = split_dim(vocab_size, group.size(), group.rank())
    if logits.shape[1] == 0:
        logits = pad(logits, (0, 1), value=-math.inf)
    top, where = logits.max(1)
    overall = top.clone()
    dist.all_reduce(overall, op=dist.ReduceOp.MAX, group=group)
    best = torch.where(top == overall, where + start, vocab_size)
    dist.all_reduce(best, op=dist.ReduceOp.MIN, group=group)
    return best


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy over logits whose vocabulary dim is split over a group.

    loss_n = log(sum_v exp(z_nv - m_n)) + m_n - z_n,target; two collectives: a max over N values and
    a sum over 2 N. Gradient: softmax - one_hot on the local columns, without communication.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocab_start: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.dtype = logits.dtype
        top = logits.amax(dim=1)  # [N]
        if logits.itemsize < 4:
            top = top.float()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - top[:, None]
        column = targets - vocab_start
        elsewhere = (column < 0) | (column >= logits.shape[1])
        column = column.masked_fill(elsewhere, 0)
        sums = torch.empty(2, len(targets), dtype=top.dtype, device=logits.device)
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
        return grad.to(ctx.dtype), None, None, None
