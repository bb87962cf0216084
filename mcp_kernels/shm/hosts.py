"""Collectives over several hosts in two levels: shared memory inside a host, gloo between hosts.

The first rank of each host is its leader. A reduction goes up to the leader, across the leaders
and down again, so that each host's result crosses the network once instead of once a rank.
What gains nothing from that (all-to-all, scatter, gather, single messages) goes through gloo.
Letters: W = ranks, H = hosts, L = most ranks of one host.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcp_kernels.shm.local import ANY_RANK, LocalComm
from mcp_kernels.shm.rendezvous import Place
from mcp_kernels.shm.tensors import check_tensor, dense, kind_of_reduction, put_back
from mcp_kernels.shm.work import TransferWork

_Red: Any = dist.ReduceOp.RedOpType
# What a reduction is carried in between its levels: 16-bit floats are rounded once, at the end, and
# gloo has no int16 and no truth values.
_CARRIERS = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.int16: torch.int32,
    torch.bool: torch.uint8,
}
_OF_BOOLS = {_Red.SUM: _Red.MAX, _Red.BOR: _Red.MAX, _Red.PRODUCT: _Red.MIN, _Red.BAND: _Red.MIN}


class HostsComm:
    """As ``LocalComm``, for a group whose ranks stand on several hosts.

    Args:
        local: the ranks of this host.
        place: of this rank.
        store: of this group alone.
        rank: of this process in the group.
        world: ranks of the group.
        timeout: of each wait.
    """

    def __init__(
        self,
        local: LocalComm,
        place: Place,
        store: dist.Store,
        rank: int,
        world: int,
        timeout: timedelta,
    ) -> None:
        self.rank = rank
        self.world = world
        self._local = local
        self._place = place
        self._flat: Any = dist.ProcessGroupGloo(
            dist.PrefixStore("flat/", store), rank, world, timeout=timeout
        )
        self._leaders: Any = None
        if local.rank == 0:
            self._leaders = dist.ProcessGroupGloo(
                dist.PrefixStore("leaders/", store), place.host, len(place.hosts), timeout=timeout
            )

    def all_reduce(self, x: Tensor, reduce_op: Any) -> None:
        """Reduce ``x`` over the ranks, in place.

        Cost: two passes through shared memory; ``x`` crosses the network once a host and ring step.
        """
        kind_of_reduction("all_reduce", x.dtype, reduce_op)  # or it raises
        check_tensor("all_reduce", x)
        red = getattr(reduce_op, "op", reduce_op)
        average = red == _Red.AVG
        if average:
            red = _Red.SUM
        elif x.dtype == torch.bool:
            red = _OF_BOOLS.get(red, red)
        carried = torch.view_as_real(dense(x)) if x.is_complex() else dense(x)
        carried = carried.to(_CARRIERS.get(carried.dtype, carried.dtype), copy=True)
        op = dist.ReduceOp(red)
        self._local.reduce(carried, op, 0)
        if self._leaders is not None:
            options = dist.AllreduceOptions()
            options.reduceOp = op
            self._leaders.allreduce([carried], options).wait()
        self._local.broadcast(carried, 0)
        if average:
            if carried.is_floating_point():
                carried.div_(self.world)
            else:
                carried.div_(self.world, rounding_mode="trunc")
        with torch.no_grad():
            target = x.detach()
            target.copy_(torch.view_as_complex(carried) if x.is_complex() else carried)

    def reduce(self, x: Tensor, reduce_op: Any, root: int) -> None:
        """Reduce ``x`` into rank ``root``'s, in place; others keep theirs."""
        total = x if self.rank == root else x.detach().clone()
        self.all_reduce(total, reduce_op)

    def reduce_scatter(self, out: Tensor, packed: Tensor, reduce_op: Any) -> None:
        """Row r of the ranks' ``packed`` [W, ...], reduced, into ``out`` [...] of rank r."""
        total = dense(packed).clone().view(self.world, -1)
        self.all_reduce(total, reduce_op)
        with torch.no_grad():
            out.detach().copy_(total[self.rank].view(out.shape))

    def all_gather(self, rows: Sequence[Tensor], x: Tensor) -> None:
        """Each rank's ``x`` into that rank's place in ``rows``."""
        hosts = self._place.hosts
        most = max(len(members) for members in hosts)
        source = dense(x)
        table = source.new_zeros(len(hosts), most, source.numel())  # [H, L, numel]
        mine = table[self._place.host]
        members = len(self._place.local_ranks)
        self._local.gather(list(mine[:members]) if self._local.rank == 0 else [], source, 0)
        if self._leaders is not None:
            self._leaders.allgather([list(table)], [mine.clone()]).wait()
        self._local.broadcast(table, 0)
        with torch.no_grad():
            for host, ranks in enumerate(hosts):
                for index, rank in enumerate(ranks):
                    rows[rank].detach().copy_(table[host, index].view(rows[rank].shape))

    def all_gather_packed(self, packed: Tensor, x: Tensor) -> None:
        """Each rank's ``x`` [...] into its row of ``packed`` [W, ...]."""
        y = dense(packed)
        self.all_gather(list(y.view(self.world, -1)), x)
        put_back([packed], [y])

    def broadcast(self, x: Tensor, root: int) -> None:
        """Rank ``root``'s ``x`` into everyone's."""
        check_tensor("broadcast", x)
        source = next(host for host, ranks in enumerate(self._place.hosts) if root in ranks)
        y = dense(x)
        if self._place.host == source:
            self._local.broadcast(y, self._place.local_ranks.index(root))
        if self._leaders is not None:
            options = dist.BroadcastOptions()
            options.rootRank = source
            self._leaders.broadcast([y], options).wait()
        if self._place.host != source:
            self._local.broadcast(y, 0)
        put_back([x], [y])

    def all_to_all(self, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> None:
        """``ins[p]`` goes to rank p, ``outs[p]`` comes from it; sizes may differ."""
        packed = torch.cat([dense(x).view(-1) for x in ins])
        sizes = [x.numel() for x in outs]
        received = packed.new_empty(sum(sizes))
        options = dist.AllToAllOptions()
        self._flat.alltoall_base(received, packed, sizes, [x.numel() for x in ins], options).wait()
        with torch.no_grad():
            for out, part in zip(outs, received.split(sizes), strict=True):
                out.detach().copy_(part.view(out.shape))

    def scatter(self, out: Tensor, rows: Sequence[Tensor], root: int) -> None:
        """Row p of rank ``root`` into ``out`` of rank p; ``rows`` is empty elsewhere."""
        options = dist.ScatterOptions()
        options.rootRank = root
        y = dense(out)
        inputs = [[dense(row) for row in rows]] if self.rank == root else []
        self._flat.scatter([y], inputs, options).wait()
        put_back([out], [y])

    def gather(self, rows: Sequence[Tensor], x: Tensor, root: int) -> None:
        """Rank p's ``x`` into row p of rank ``root``; ``rows`` is empty elsewhere."""
        options = dist.GatherOptions()
        options.rootRank = root
        outs = [dense(row) for row in rows]
        outputs = [outs] if self.rank == root else []
        self._flat.gather(outputs, [dense(x)], options).wait()
        put_back(rows, outs)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._local.barrier()
        if self._leaders is not None:
            self._leaders.barrier(dist.BarrierOptions()).wait()
        self._local.barrier()

    def send(self, x: Tensor, peer: int, tag: int) -> TransferWork:
        """Post ``x`` to rank ``peer``."""
        source = dense(x)
        return TransferWork(_GlooTransfer(self._flat.send([source], peer, tag), peer), source)

    def receive(self, x: Tensor, peer: int, tag: int) -> TransferWork:
        """Post a receive into ``x`` from rank ``peer``, or from ``ANY_RANK``."""
        target = dense(x)
        if peer == ANY_RANK:
            work = self._flat.recv_anysource([target], tag)
        else:
            work = self._flat.recv([target], peer, tag)
        in_place = target is x
        finish = None if in_place else lambda: x.detach().copy_(target)
        return TransferWork(_GlooTransfer(work, peer), x, finish)


class _GlooTransfer:
    """A gloo work in the shape of the compiled group's transfer."""

    def __init__(self, work: dist.Work, peer: int) -> None:
        self._work = work
        self._peer = peer
        self.done = False

    def wait(self, timeout_s: float) -> None:
        if timeout_s > 0:
            self._work.wait(timedelta(seconds=timeout_s))
        else:
            self._work.wait()
        self.done = True

    def test(self) -> bool:
        # gloo's own is_completed of a transfer never turns true without a wait.
        return self.done

    @property
    def peer(self) -> int:
        return self._work._source_rank() if self._peer == ANY_RANK else self._peer
