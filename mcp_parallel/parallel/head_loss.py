"""The head and its loss in one: cross-entropy over a vocabulary whose logits never exist at once.

    z = x W^T                          logits of a chunk of positions, made, used and forgotten
    l = log(sum_v exp(z_v)) - z_t      summed over positions with a target, times ``scale``
    dz = scale (softmax(z) - onehot(t)),  dx = dz W,  dW = sum over chunks of dz^T x

The gradient of a loss is its input's up to one factor, so forward makes dx and dW while a chunk's
logits are in cache: 6 N V D flops, as the plain chain of ops takes, without its five passes over
``[N, V]`` in memory. What waits for backward is dW and dx in place of N V logits. Where several
forwards wait for their backwards (GPipe), dW would wait in as many copies: there ``recompute``
keeps x and two numbers a position and makes the logits again, for 2 N V D flops more.

Where all logits fit into a core's cache, the plain chain of ops is up to a tenth faster and runs.

With the vocabulary cut over a group, each rank's maximum, sum and target logit of a chunk go to all
in one message, and every rank joins them in the same order: the loss has the same bits on each.

Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (2024); Hsu et al.,
"Liger Kernel" (2024), section 3.2.
Letters: N = positions (B S), D = hidden size, V = this rank's part of the vocabulary, n = positions
of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from mcp_kernels.nn.sharding import to_locals
from mcp_kernels.ops.collectives import all_gather, copy_to_group
from mcp_parallel.config import Config
from mcp_parallel.layout import split_dim
from mcp_parallel.model.loss import IGNORED, token_loss
from mcp_parallel.model.stage import StageModel
from mcp_parallel.parallel.mesh import Mesh
from mcp_parallel.parallel.parallelize import Stage
from mcp_parallel.parallel.tensor import build_token_loss

StageLoss = Callable[[Tensor, Tensor, float], Tensor]
"""(what the last stage gives, targets ``[b, S]``, scale) -> ``scale`` times the summed loss."""

# A chunk's logits: on a CPU what a core's share of the last cache holds, on a GPU enough rows to
# fill it. Fewer rows than the second number read W too often for what they compute with it.
_CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
_MIN_ROWS = {"cpu": 128, "cuda": 1024}
# Up to here logits stay in a core's cache, and what counts is that torch's two ops are two calls.
_SMALL_BYTES = 4 * 2**20


def build_stage_loss(stages: Sequence[Stage], config: Config, mesh: Mesh) -> StageLoss:
    """The loss of what the last of ``stages`` gives; where it can, that stage leaves its head here.

    A model whose head is more than a linear layer keeps it, and the loss is of its logits.
    """
    model, group = stages[-1].model, mesh.group("tp")
    if not stages[-1].is_last or not model.can_leave_head:
        token_loss = build_token_loss(config.model.vocab_size, mesh)
        return lambda logits, targets, scale: token_loss(logits, targets) * scale
    model.leaves_head = True
    vocab_start = 0
    if group is not None:
        vocab_start, _ = split_dim(config.model.vocab_size, group.size(), group.rank())
    recompute = _dw_outgrows_logits(config, mesh)

    def stage_loss(x: Tensor, targets: Tensor, scale: float) -> Tensor:
        if group is not None and mesh.layout.sequence_parallel:
            x = all_gather(x, group=group, gather_dim=1, gather_size=targets.shape[1])
        elif group is not None:
            x = copy_to_group(x, group=group)
        assert isinstance(model.head, torch.nn.Linear)
        [weight] = to_locals([model.head.weight])
        losses = [
            head_loss(
                x.to(dtype),
                weight.to(dtype),
                targets,
                scale=scale * share,
                vocab_start=vocab_start,
                group=group,
                recompute=recompute,
            )
            for dtype, share in _formats(model, x, weight)
        ]
        return losses[0] if len(losses) == 1 else losses[0] + losses[1]

    return stage_loss


def _formats(model: StageModel, x: Tensor, weight: Tensor) -> list[tuple[torch.dtype, float]]:
    """Number formats in which to compute the loss, each with its weight in it."""
    if model.mixture is None or not model.ties_embedding:
        return [(x.dtype, 1.0)]
    share = model.mixture.fp32_share
    formats = [(weight.dtype, share), (x.dtype, 1 - share)]
    return [(dtype, part) for dtype, part in formats if part > 0]


def _dw_outgrows_logits(config: Config, mesh: Mesh) -> bool:
    """GPipe keeps every micro-batch's dW ``[V, D]`` in place of its logits ``[N, V]``: is D > N?"""
    is_gpipe = mesh.layout.pp > 1 and mesh.layout.schedule == "gpipe"
    return is_gpipe and (
        config.model.hidden_size
        > config.train.micro_batch_size * config.model.seq_len // mesh.layout.cp
    )


def head_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    scale: float = 1.0,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    recompute: bool = False,
) -> Tensor:
    """``scale`` times the summed cross-entropy of ``x @ weight.T``, without its logits.

    Args:
        x: ``[..., D]``, the same on every rank of ``group``; float64, float32, bfloat16, float16.
        weight: ``[V, D]``, x's dtype; V may be 0.
        targets: int64 ``[...]``, numbers of the whole vocabulary, ``IGNORED`` where there is none.
        scale: of the loss, known before backward; one over the number of targets makes a mean.
        vocab_start: number of ``weight``'s first row in the whole vocabulary.
        group: the ranks that the vocabulary is cut over; None where ``weight`` is all of it.
        recompute: make the logits again in backward (see above), unless all are small.

    Returns:
        ``[]``, nats, float32 (float64 for float64 inputs), the same bits on every rank. The
        gradient of x is this rank's part of it: the sum over ``group`` is all.

    Raises:
        ValueError: a shape does not fit.

    Cost: 6 N V D flops forward and backward together, 8 with ``recompute``; an all-gather of 3 n
    numbers a chunk.
    """
    if x.shape[:-1] != targets.shape or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"head_loss: x must be [..., D], weight [V, D] and targets [...], got {list(x.shape)}, "
            f"{list(weight.shape)} and {list(targets.shape)}"
        )
    logits_bytes = targets.numel() * weight.shape[0] * x.itemsize
    if group is None and x.dtype == _wide(x.dtype) and logits_bytes <= _SMALL_BYTES:
        return token_loss(linear(x, weight), targets) * scale
    keeps = torch.is_grad_enabled()
    return _HeadLoss.apply(x, weight, targets, scale, vocab_start, group, recompute, keeps)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class _Chunk:
    """Some positions: where they are, and where their targets lie in this rank's vocabulary."""

    rows: slice
    x: Tensor
    """``[n, D]``."""
    column: Tensor
    """``[n]``, 0 where ``elsewhere``."""
    elsewhere: Tensor
    """``[n]``, the target is another rank's or none."""
    counted: Tensor
    """``[n]``, there is a target."""


def _chunks(x: Tensor, weight: Tensor, targets: Tensor, vocab_start: int) -> Iterator[_Chunk]:
    rows, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    vocab, step = weight.shape[0], _rows_of_a_chunk(weight)
    for start in range(0, len(rows), step):
        at = slice(start, min(start + step, len(rows)))
        column = targets[at] - vocab_start
        elsewhere = (column < 0) | (column >= vocab)
        column.masked_fill_(elsewhere, 0)
        yield _Chunk(at, rows[at], column, elsewhere, targets[at] != IGNORED)


def _rows_of_a_chunk(weight: Tensor) -> int:
    kind = weight.device.type
    row_bytes = max(1, weight.shape[0] * _wide(weight.dtype).itemsize)
    return max(_MIN_ROWS.get(kind, 1024), _CHUNK_BYTES.get(kind, 2**28) // row_bytes)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What sums and exponentials are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _logits(chunk: _Chunk, weight: Tensor) -> Tensor:
    return torch.mm(chunk.x, weight.t()).to(_wide(weight.dtype))


def _statistics_(z: Tensor, chunk: _Chunk) -> Tensor:
    """``[3, n]`` maximum m, sum of exp(z - m) and target logit; ``z`` becomes exp(z - m)."""
    found = z.new_empty(3, len(z))
    if not z.shape[1]:  # a rank without vocabulary
        found[0], found[1], found[2] = -math.inf, 0, -math.inf
        return found
    top = torch.amax(z, 1, out=found[0])
    target = torch.gather(z, 1, chunk.column[:, None], out=found[2][:, None])
    target[:, 0].masked_fill_(chunk.elsewhere, -math.inf)
    torch.sum(z.sub_(top[:, None]).exp_(), 1, out=found[1])
    return found


def _join(found: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The statistics of the whole vocabulary from those of this rank's part."""
    if group is None:
        return found
    parts = found.new_empty(group.size(), *found.shape)
    group._allgather_base(parts.view(-1), found.view(-1)).wait()
    tops, totals, targets = parts.unbind(1)  # [W, n] each
    top = tops.amax(0)
    return torch.stack([top, (totals * (tops - top).exp_()).sum(0), targets.amax(0)])


def _softmax_to_gradient_(exp: Tensor, share: Tensor, scale: float, chunk: _Chunk) -> Tensor:
    """``exp * share`` is the softmax; in place, the gradient of ``scale`` times the loss by z."""
    exp.mul_((share * chunk.counted).mul_(scale)[:, None])
    if exp.shape[1]:
        here = (chunk.counted & ~chunk.elsewhere).to(exp.dtype).mul_(-scale)
        exp.scatter_add_(1, chunk.column[:, None], here[:, None])
    return exp


class _Gradients:
    """dx and dW of the chunks so far, each only where it is asked for."""

    def __init__(self, x: Tensor, weight: Tensor, needs: tuple[bool, bool]) -> None:
        self.weight, self.needs_dw = weight, needs[1]
        self.dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else None
        self.dw: Tensor | None = None

    def add(self, dz: Tensor, chunk: _Chunk) -> None:
        """Take in a chunk; dW is summed in float32 or wider."""
        dz = dz.to(self.weight.dtype)
        if self.dx is not None:
            torch.mm(dz, self.weight, out=self.dx.view(-1, self.dx.shape[-1])[chunk.rows])
        if not self.needs_dw:
            return
        if self.dw is None:
            self.dw = torch.mm(dz.t(), chunk.x).to(_wide(dz.dtype))
        elif dz.dtype == self.dw.dtype:
            self.dw.addmm_(dz.t(), chunk.x)
        else:
            self.dw.add_(torch.mm(dz.t(), chunk.x))


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: float,
        vocab_start: int,
        group: dist.ProcessGroup | None,
        recompute: bool,
        keeps: bool,
    ) -> Tensor:
        needs = ctx.needs_input_grad[:2] if keeps else (False, False)
        grads = None if recompute or not any(needs) else _Gradients(x, weight, needs)
        # float16 gradients times a small scale would be rounded to nothing, so it comes last there.
        early = scale if _wide(x.dtype) == x.dtype else 1.0
        kept: list[Tensor] = []
        ctx.grads, ctx.late, ctx.needs = grads, scale / early, needs
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        for chunk in _chunks(x, weight, targets, vocab_start):
            z = _logits(chunk, weight)
            mine = _statistics_(z, chunk)
            top, exp_sum, target = whole = _join(mine, group)
            loss = (exp_sum.log() + (top - target)).masked_fill_(~chunk.counted, 0)
            total += loss.sum(dtype=torch.float64)
            if grads is not None:
                share = (mine[0] - top).exp_().div_(exp_sum) if group else exp_sum.reciprocal()
                grads.add(_softmax_to_gradient_(z, share, early, chunk), chunk)
            elif any(needs):
                kept.append(whole[:2])
            del z  # or it would still be there while the next chunk's is made
        if kept:
            ctx.early, ctx.vocab_start = early, vocab_start
            ctx.save_for_backward(x, weight, targets, torch.cat(kept, 1))
        return total.mul_(scale).to(_wide(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Not saved by save_for_backward: hooks that compress activations must not see gradients.
        grads = ctx.grads or _recomputed(ctx)
        is_last_use = not torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]
        if is_last_use:
            ctx.grads = None
        factor = upstream[0] * ctx.late
        # On a GPU reading the factor would stop the stream, which costs more than the products do.
        is_one = factor.is_cpu and factor.item() == 1
        dx, dw = grads.dx, grads.dw
        if not is_one:
            dx = None if dx is None else dx.mul(factor)
            dw = None if dw is None else dw.mul_(factor) if is_last_use else dw * factor
        if grads.needs_dw and dw is None:  # no position at all
            dw = torch.zeros_like(grads.weight)
        dw = None if dw is None else dw.to(grads.weight.dtype)
        return dx, dw, None, None, None, None, None, None


def _recomputed(ctx: Any) -> _Gradients:
    """What forward would have kept, from the maximum and sum of each position."""
    x, weight, targets, statistics = ctx.saved_tensors
    grads = _Gradients(x, weight, ctx.needs)
    for chunk in _chunks(x, weight, targets, ctx.vocab_start):
        top, exp_sum = statistics[:, chunk.rows]
        exp = _logits(chunk, weight).sub_(top[:, None]).exp_()
        share = exp_sum.reciprocal()
        grads.add(_softmax_to_gradient_(exp, share, ctx.early, chunk), chunk)
        del exp
    return grads
