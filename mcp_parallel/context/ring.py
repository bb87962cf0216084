"""Ring attention: keys and values go round the ranks, each works on the block at hand.

Forward, at step s, rank r holds the keys of rank r - s, hands them on while it attends to them,
and joins what it gets with what it has by their log-sum-exps. Backward sends keys round the same
way, and with each block travels the sum of its gradients, one hop behind: after as many hops as
there are ranks it is back where its keys live. Gradients travel in the precision of sums.

With the causal split (``split.py``) a step costs every rank the same: of an earlier rank's keys
only the early chunk is seen, by both chunks of rows; of a later rank's both chunks are seen, by
the late chunk of rows. What nobody sees is not computed.

Beside its own keys, which wait for backward anyway, a rank holds two blocks at most, the one at
hand and the one that arrives, however many ranks there are.

Source: Liu et al., "Ring Attention with Blockwise Transformers" (2023).
Cost: W - 1 times the bytes of a rank's keys and values forward; backward as much again, and W
times their gradients.
Letters: W = ranks; others as in ``block.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mcp_kernels import merge_attention
from mcp_parallel.context.block import (
    Bounds,
    attend_block,
    attend_block_backward,
    results_of,
)
from mcp_parallel.context.split import Split


class Step(NamedTuple):
    """Which rows and keys meet at one step, and how."""

    rows: slice
    keys: slice
    causal: bool
    bounds: Bounds | None


def steps_of(split: Split, bounds: Sequence[Bounds] = ()) -> Iterator[Step | None]:
    """What this rank does at each step; None where no row sees a key of the block.

    Args:
        split: this rank's.
        bounds: of documents (``documents.ring_bounds``), or none.
    """
    chunk, every = split.chunk_len, slice(None)
    for index in range(split.ranks):
        causal = index == 0
        if bounds:
            of_step = bounds[index]
            yield Step(every, every, causal, of_step) if len(of_step.rows) > 1 else None
        elif causal:
            yield Step(every, every, causal, None)
        elif index <= split.rank:  # the keys of an earlier rank
            yield Step(every, slice(chunk), causal, None)
        else:
            yield Step(slice(chunk, None), every, causal, None)


class _Ring:
    """Sends to the next rank of a group and receives from the one before."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._next = (group.rank() + 1) % group.size()
        self._previous = (group.rank() - 1) % group.size()

    def start(self, sent: Tensor) -> _Pending:
        """Begin to hand ``sent`` on; it must not change until ``finish``."""
        if self._group.size() == 1:
            return _Pending(sent, [])
        arriving = torch.empty_like(sent)
        if sent.is_cpu:  # what c10d's own functions do, without their 0.2 ms of Python
            works = [
                self._group.send([sent], self._next, 0),
                self._group.recv([arriving], self._previous, 0),
            ]
            return _Pending(arriving, works)
        # NCCL must be told of both in one call, or each would wait for the other.
        peers = [dist.get_global_rank(self._group, r) for r in (self._next, self._previous)]
        messages = [
            dist.P2POp(dist.isend, sent, peers[0], self._group),
            dist.P2POp(dist.irecv, arriving, peers[1], self._group),
        ]
        return _Pending(arriving, dist.batch_isend_irecv(messages))


class _Pending(NamedTuple):
    """A message on its way."""

    arriving: Tensor
    works: list[dist.Work]

    def finish(self) -> Tensor:
        """What arrived."""
        for work in self.works:
            work.wait()
        return self.arriving


def ring_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    split: Split,
    group: dist.ProcessGroup,
    bounds: Sequence[Bounds] = (),
) -> tuple[Tensor, Tensor]:
    """This rank's rows of causal attention over the whole sequence; collective over ``group``.

    Args:
        q: ``[B, 2 chunk, H, K]``.
        k: ``[B, 2 chunk, N, K]``.
        v: as k.
        split: this rank's.
        group: the ranks that share the sequence, in the order of ``split``.
        bounds: of documents, or none.

    Returns:
        ``(out [B, 2 chunk, H, K], lse [B, H, 2 chunk])``.
    """
    ring = _Ring(group)
    held = torch.stack([k, v])  # one message a step
    total: Tensor | None = None
    lse: Tensor | None = None
    for index, step in enumerate(steps_of(split, bounds)):
        pending = ring.start(held) if index + 1 < split.ranks else None
        if step is not None:
            keys, values = held[:, :, step.keys]
            part, part_lse = attend_block(
                q[:, step.rows], keys, values, causal=step.causal, bounds=step.bounds
            )
            if total is None or lse is None:
                total, lse = part.to(part_lse.dtype), part_lse.contiguous()
            else:
                _merge(total[:, step.rows], lse[:, :, step.rows], part, part_lse)
        if pending is not None:
            held = pending.finish()
    assert total is not None, "every row sees itself, at the first step"
    assert lse is not None
    return total.to(q.dtype), lse


def _merge(total: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Join a part into ``total`` and ``lse``, in place."""
    merged, merged_lse = merge_attention([total, part], [lse, part_lse])
    total.copy_(merged)
    lse.copy_(merged_lse)


def ring_backward(
    dout: Tensor,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    split: Split,
    group: dist.ProcessGroup,
    bounds: Sequence[Bounds] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) of ``ring_forward``; collective over ``group``.

    Args:
        dout: ``[B, 2 chunk, H, K]``.
        saved: (q, k, v, out, lse) of the forward.
        split: as there.
        group: as there.
        bounds: as there.
    """
    q, k, v, out, lse = saved
    ring, results = _Ring(group), results_of(dout, out, lse)
    held = torch.stack([k, v])
    dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
    behind: _Pending | None = None
    for index, step in enumerate(steps_of(split, bounds)):
        ahead = ring.start(held) if index + 1 < split.ranks else None
        found: tuple[Tensor, ...] | None = None
        if step is not None:
            rows = results.of_rows(step.rows)
            keys, values = held[:, :, step.keys]
            found = attend_block_backward(
                q[:, step.rows], keys, values, rows, causal=step.causal, bounds=step.bounds
            )
            dq[:, step.rows] += found[0]
        # Of the block at hand, from all ranks that had it before.
        grads = torch.zeros_like(held, dtype=lse.dtype) if behind is None else behind.finish()
        if step is not None and found is not None:
            for total, part in zip(grads, found[1:], strict=True):
                total[:, step.keys] += part
        behind = ring.start(grads)
        if ahead is not None:
            held = ahead.finish()
    assert behind is not None
    dk, dv = behind.finish()
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
