"""Ring attention: keys and values go round the ranks, each works on the block at hand.

Forward, at step s, rank r holds the keys of rank r - s, hands them on while it attends to them,
and joins what it gets with what it has by their log-sum-exps. Backward sends keys round the same
way, and with each block travels the sum of its gradients, one hop behind: after as many hops as
there are ranks it is back where its keys live. Gradients travel in the precision of sums.

With the causal split (``split.py``) a step costs every rank the same: of an earlier rank's keys
only the early chunk is seen, by both chunks of rows; of a later rank's both chunks are seen, by
the late chunk of rows. What nobody sees is not computed.

Where attention stays within documents most ranks need no keys of most others, and every rank knows
who does. A block then goes from its owner straight to those that see it, at the same steps, and its
gradients come straight back: what nobody sees is not sent.

Beside its own keys, which wait for backward anyway, a rank holds two blocks at most, the one at
hand and the one that arrives, however many ranks there are.

Source: Liu et al., "Ring Attention with Blockwise Transformers" (2023).
Cost: W - 1 times the bytes of a rank's keys and values forward; backward as much again, and W
times their gradients. With documents, a block for each pair of ranks that share one, forward, and
backward the block and its gradients.
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
from mcp_parallel.context.documents import RingDocuments
from mcp_parallel.context.split import Split


class Step(NamedTuple):
    """Which rows and keys meet at one step, and how."""

    rows: slice
    keys: slice
    causal: bool
    bounds: Bounds | None


def steps_of(
    split: Split, bounds: Sequence[Bounds] = (), *, causal: bool = True
) -> Iterator[Step | None]:
    """What this rank does at each step; None where no row sees a key of the block.

    Args:
        split: this rank's.
        bounds: of documents (``documents.ring_bounds``), or none.
        causal: a row sees no later key; documents are of causal attention alone.
    """
    chunk, every = split.chunk_len, slice(None)
    for index in range(split.ranks):
        is_own = index == 0
        if bounds:
            of_step = bounds[index]
            yield Step(every, every, is_own, of_step) if len(of_step.rows) > 1 else None
        elif is_own or not causal:
            yield Step(every, every, causal, None)
        elif index <= split.rank:  # the keys of an earlier rank
            yield Step(every, slice(chunk), False, None)
        else:
            yield Step(slice(chunk, None), every, False, None)


class _Pending(NamedTuple):
    """Messages on their way."""

    arriving: Tensor | None
    works: list[dist.Work]

    def finish(self) -> Tensor | None:
        """What arrived, once it has, and what was sent may change again."""
        for work in self.works:
            work.wait()
        return self.arriving


class _Routes:
    """Who sends what to whom at each step.

    Of two messages from one rank to another the receiver expects first what was sent first: both
    sides start the same messages at the same steps, keys before gradients.
    """

    def __init__(
        self, group: dist.ProcessGroup, split: Split, documents: RingDocuments | tuple[()]
    ) -> None:
        self._group, self._split = group, split
        self.is_direct = bool(documents)
        if documents:
            self._sees = [len(bounds.rows) > 1 for bounds in documents.bounds]
            self._is_wanted = documents.is_wanted

    def keys(self, sent: Tensor, step: int) -> _Pending | None:
        """Begin to get the block of ``step``.

        Args:
            sent: the block at hand, or where blocks go straight to who sees them this rank's own;
                kept alive and unchanged until ``finish``.
            step: the one to come; None is the result after the last.
        """
        if step == self._split.ranks:
            return None
        if not self.is_direct:
            return self._start(sent, 1, -1)
        return self._start(
            sent, step if self._is_wanted[step] else None, -step if self._sees[step] else None
        )

    def onward(self, grads: Tensor) -> _Pending:
        """Begin to hand the gradients of the block at hand on, and to get the next block's."""
        return self._start(grads, 1, -1)

    def home(self, grads: Tensor, step: int) -> _Pending:
        """Begin to send the gradients of the block of ``step`` to its owner, and to get one's own.

        ``grads`` is sent only where this rank saw a key of the block.
        """
        return self._start(
            grads, -step if self._sees[step] else None, step if self._is_wanted[step] else None
        )

    def _start(self, sent: Tensor, to: int | None, source: int | None) -> _Pending:
        """Send to the rank ``to`` places on, receive from that at ``source``; None is nobody."""
        ranks, rank = self._split.ranks, self._split.rank
        if ranks == 1:
            return _Pending(sent, [])
        arriving = None if source is None else torch.empty_like(sent)
        messages = [(dist.isend, sent, to), (dist.irecv, arriving, source)]
        chosen = [(op, t, (rank + at) % ranks) for op, t, at in messages if t is not None and at]
        if sent.is_cpu:  # what c10d's own functions do, without their 0.2 ms of Python
            works = [
                self._group.send([t], peer, 0)
                if op is dist.isend
                else self._group.recv([t], peer, 0)
                for op, t, peer in chosen
            ]
            return _Pending(arriving, works)
        # NCCL must be told of both in one call, or each would wait for the other.
        batch = [
            dist.P2POp(op, t, dist.get_global_rank(self._group, peer), self._group)
            for op, t, peer in chosen
        ]
        return _Pending(arriving, dist.batch_isend_irecv(batch) if batch else [])


def ring_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    split: Split,
    group: dist.ProcessGroup,
    documents: RingDocuments | tuple[()] = (),
    *,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """This rank's rows of attention over the whole sequence; collective over ``group``.

    Args:
        q: ``[B, 2 chunk, H, K]``.
        k: ``[B, 2 chunk, N, K]``.
        v: as k.
        split: this rank's.
        group: the ranks that share the sequence, in the order of ``split``.
        documents: who meets whom, or nothing.
        causal: a row sees no later key.

    Returns:
        ``(out [B, 2 chunk, H, K], lse [B, H, 2 chunk])``.
    """
    routes = _Routes(group, split, documents)
    held: Tensor | None = torch.stack([k, v])  # one message a step
    own = held if routes.is_direct else None
    total: Tensor | None = None
    lse: Tensor | None = None
    for index, step in enumerate(steps_of(split, _bounds(documents), causal=causal)):
        pending = routes.keys(_sent(own, held), index + 1)
        if step is not None:
            assert held is not None, "what is seen was sent"
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


def _sent(own: Tensor | None, held: Tensor | None) -> Tensor:
    """What a rank sends to others: its own block where they ask for it, else the one at hand."""
    sent = held if own is None else own
    assert sent is not None, "on the ring every block arrives"
    return sent


def _bounds(documents: RingDocuments | tuple[()]) -> Sequence[Bounds]:
    return documents.bounds if documents else ()


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
    documents: RingDocuments | tuple[()] = (),
    *,
    causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) of ``ring_forward``; collective over ``group``.

    Args:
        dout: ``[B, 2 chunk, H, K]``.
        saved: (q, k, v, out, lse) of the forward.
        split: as there.
        group: as there.
        documents: as there.
        causal: as there.
    """
    q, k, v, out, lse = saved
    routes, results = _Routes(group, split, documents), results_of(dout, out, lse)
    held: Tensor | None = torch.stack([k, v])
    own = held if routes.is_direct else None
    sums = _DirectSums(routes) if routes.is_direct else _TravellingSums(routes)
    shape, dtype = held.shape, lse.dtype
    dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
    for index, step in enumerate(steps_of(split, _bounds(documents), causal=causal)):
        ahead = routes.keys(_sent(own, held), index + 1)
        found: tuple[Tensor, ...] | None = None
        if step is not None:
            assert held is not None, "what is seen was sent"
            rows = results.of_rows(step.rows)
            keys, values = held[:, :, step.keys]
            found = attend_block_backward(
                q[:, step.rows], keys, values, rows, causal=step.causal, bounds=step.bounds
            )
            dq[:, step.rows] += found[0]
        grads = sums.of_block(index)
        if grads is None:
            grads = torch.zeros(shape, dtype=dtype, device=q.device)
        if step is not None and found is not None:
            for total, part in zip(grads, found[1:], strict=True):
                total[:, step.keys] += part
        sums.give(grads, index)
        if ahead is not None:
            held = ahead.finish()
    dk, dv = sums.own()
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _TravellingSums:
    """With each block travels the sum of its gradients, from all ranks that had it before."""

    def __init__(self, routes: _Routes) -> None:
        self._routes = routes
        self._behind: _Pending | None = None

    def of_block(self, step: int) -> Tensor | None:
        """The sum so far of the block of ``step``; None where it begins here."""
        del step
        return None if self._behind is None else self._behind.finish()

    def give(self, grads: Tensor, step: int) -> None:
        """Hand it on."""
        del step
        self._behind = self._routes.onward(grads)

    def own(self) -> Tensor:
        """The sum of this rank's own block, ``[2, B, 2 chunk, N, K]``."""
        grads = None if self._behind is None else self._behind.finish()
        assert grads is not None, "it went all the way round"
        return grads


class _DirectSums:
    """Gradients come straight back from each rank that saw the block, and are summed here."""

    def __init__(self, routes: _Routes) -> None:
        self._routes = routes
        self._total: Tensor | None = None
        self._behind: _Pending | None = None

    def of_block(self, step: int) -> Tensor | None:
        """What this rank adds to the block of ``step`` begins here."""

    def give(self, grads: Tensor, step: int) -> None:
        """Send it home."""
        if step == 0:
            self._total = grads
            return
        self._take()
        self._behind = self._routes.home(grads, step)

    def _take(self) -> None:
        arrived = None if self._behind is None else self._behind.finish()
        self._behind = None
        if arrived is not None:
            assert self._total is not None
            self._total += arrived

    def own(self) -> Tensor:
        """As ``_TravellingSums.own``."""
        self._take()
        assert self._total is not None
        return self._total
