"""Collectives of tensors among the ranks of one host. Letters: W = ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcp_kernels._shm import Reduction
from mcp_kernels.shm.tensors import (
    REAL_KINDS,
    TYPES,
    check_tensor,
    dense,
    kind_of_reduction,
    num_elements,
    number_of_reduction,
    put_back,
)
from mcp_kernels.shm.work import TransferWork

if TYPE_CHECKING:
    from mcp_kernels._shm import Group

ANY_RANK = -1
_SUM = Reduction.sum
_STRIDED = torch.strided


class LocalComm:
    """The compiled group for tensors of any strides; ranks and roots are those of the group."""

    def __init__(self, group: Group, rank: int, world: int) -> None:
        self.group = group
        self.rank = rank
        self.world = world
        self._all_reduce = group.all_reduce  # bound once: a small call is a microsecond
        self._open: set[TransferWork] = set()

    def all_reduce(self, x: Tensor, reduce_op: Any) -> None:
        """Reduce ``x`` over the ranks, in place."""
        kinds = REAL_KINDS.get(x.dtype)
        if kinds is not None and x.layout is _STRIDED and x.is_contiguous():
            entry = kinds.get(number_of_reduction(reduce_op))
            if entry is not None:
                at = x.data_ptr()
                self._all_reduce(at, at, x.numel(), *entry)
                return
        kind, reduction, average = kind_of_reduction("all_reduce", x.dtype, reduce_op)
        check_tensor("all_reduce", x)
        y = dense(x)
        at = y.data_ptr()
        self.group.all_reduce(at, at, num_elements(y), kind, reduction, average)
        put_back([x], [y])

    def sum_(self, x: Tensor) -> None:
        """Sum contiguous ``x`` of a real dtype over the ranks, in place."""
        at = x.data_ptr()
        self._all_reduce(at, at, x.numel(), TYPES[x.dtype], _SUM, False)

    def sum_of(self, x: Tensor) -> Tensor:
        """The ranks' contiguous ``x`` of a real dtype summed, which is read and stays."""
        out = torch.empty_like(x)
        self._all_reduce(x.data_ptr(), out.data_ptr(), x.numel(), TYPES[x.dtype], _SUM, False)
        return out

    def reduce(self, x: Tensor, reduce_op: Any, root: int) -> None:
        """Reduce ``x`` into rank ``root``'s, in place; others keep theirs."""
        kind, reduction, average = kind_of_reduction("reduce", x.dtype, reduce_op)
        check_tensor("reduce", x)
        y = dense(x)
        at = y.data_ptr()
        self.group.reduce(at, at, num_elements(y), kind, reduction, average, root)
        put_back([x], [y])

    def reduce_scatter(self, out: Tensor, packed: Tensor, reduce_op: Any) -> None:
        """Row r of the ranks' ``packed`` [W, ...], reduced, into ``out`` [...] of rank r."""
        kind, reduction, average = kind_of_reduction("reduce_scatter", out.dtype, reduce_op)
        check_tensor("reduce_scatter", out)
        source = dense(packed)
        y = dense(out)
        self.group.reduce_scatter(
            source.data_ptr(), y.data_ptr(), num_elements(y), kind, reduction, average
        )
        put_back([out], [y])

    def all_gather(self, rows: Sequence[Tensor], x: Tensor) -> None:
        """Each rank's ``x`` into that rank's place in ``rows``."""
        source = dense(x)
        outs = [dense(row) for row in rows]
        places = [row.data_ptr() for row in outs]
        self.group.all_gather(source.data_ptr(), places, source.nbytes)
        put_back(rows, outs)

    def all_gather_packed(self, packed: Tensor, x: Tensor) -> None:
        """Each rank's ``x`` [...] into its row of ``packed`` [W, ...]."""
        source = dense(x)
        y = dense(packed)
        at, row = y.data_ptr(), source.nbytes
        places = [at + row * rank for rank in range(self.world)]
        self.group.all_gather(source.data_ptr(), places, row)
        put_back([packed], [y])

    def broadcast(self, x: Tensor, root: int) -> None:
        """Rank ``root``'s ``x`` into everyone's."""
        check_tensor("broadcast", x)
        y = dense(x)
        self.group.broadcast(y.data_ptr(), y.nbytes, root)
        put_back([x], [y])

    def all_to_all(self, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> None:
        """``ins[p]`` goes to rank p, ``outs[p]`` comes from it; sizes may differ."""
        sources = [dense(x) for x in ins]
        targets = [dense(row) for row in outs]
        self.group.all_to_all(
            [x.data_ptr() for x in sources],
            [x.nbytes for x in sources],
            [x.data_ptr() for x in targets],
            [x.nbytes for x in targets],
        )
        put_back(outs, targets)

    def scatter(self, out: Tensor, rows: Sequence[Tensor], root: int) -> None:
        """Row p of rank ``root`` into ``out`` of rank p; ``rows`` is empty elsewhere."""
        sources = [dense(row) for row in rows]
        y = dense(out)
        places = [row.data_ptr() for row in sources]
        self.group.scatter(places, y.data_ptr(), y.nbytes, root)
        put_back([out], [y])

    def gather(self, rows: Sequence[Tensor], x: Tensor, root: int) -> None:
        """Rank p's ``x`` into row p of rank ``root``; ``rows`` is empty elsewhere."""
        source = dense(x)
        outs = [dense(row) for row in rows]
        places = [row.data_ptr() for row in outs]
        self.group.gather(source.data_ptr(), places, source.nbytes, root)
        put_back(rows, outs)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.group.barrier()

    def send(self, x: Tensor, peer: int, tag: int) -> TransferWork:
        """Post ``x`` to rank ``peer``."""
        check_tensor("send", x)
        source = dense(x)
        transfer = self.group.send(source.data_ptr(), source.nbytes, peer, tag)
        return self._keep(TransferWork(transfer, source))

    def receive(self, x: Tensor, peer: int, tag: int) -> TransferWork:
        """Post a receive into ``x`` from rank ``peer``, or from ``ANY_RANK``."""
        check_tensor("recv", x)
        target = dense(x)
        transfer = self.group.receive(target.data_ptr(), target.nbytes, peer, tag)
        in_place = target is x
        return self._keep(TransferWork(transfer, x, None if in_place else lambda: _put(x, target)))

    def _keep(self, work: TransferWork) -> TransferWork:
        """Hold the tensors of open transfers, whatever the caller does with the work.

        One that is waited for leaves at once: a caller that drops its tensor then means to free it.
        """
        self._open.difference_update([other for other in self._open if other.is_success()])
        if not work.is_success():
            work.holders = self._open
            self._open.add(work)
        return work


def _put(target: Tensor, source: Tensor) -> None:
    with torch.no_grad():
        target.detach().copy_(source)
