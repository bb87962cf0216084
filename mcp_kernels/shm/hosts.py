"""Collectives over several hosts in two levels: shared memory inside a host, gloo between hosts.

The first rank of each host is its leader. A reduction goes up to the leader, across the leaders
and down again, so that each host's result crosses the network once instead of once a rank.
A reduce-scatter has no leader: each host's ranks share its rows and send them to their owners.
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

from mcp_kernels import _shm
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
        # All ranks, over the network: for what gains nothing from two levels.
        self.flat: Any = dist.ProcessGroupGloo(
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
        carried, op, average = _carried(x, reduce_op)
        self._local.reduce(carried, op, 0)
        if self._leaders is not None:
            options = dist.AllreduceOptions()
            options.reduceOp = op
            self._leaders.allreduce([carried], options).wait()
        self._local.broadcast(carried, 0)
        _put_carried(x, carried, self.world if average else 0)

    def reduce(self, x: Tensor, reduce_op: Any, root: int) -> None:
        """Reduce ``x`` into rank ``root``'s, in place; others keep theirs."""
        total = x if self.rank == root else x.detach().clone()
        self.all_reduce(total, reduce_op)

    def reduce_scatter(self, out: Tensor, packed: Tensor, reduce_op: Any) -> None:
        """Row r of the ranks' ``packed`` [W, ...], reduced, into ``out`` [...] of rank r.

        A host reduces its own ranks' rows first, spread over these ranks: the one that takes rank
        r's row sends it to r, which reduces one row of each host.

        Cost: one pass through shared memory; a row crosses the network once from each other host.
        """
        kind_of_reduction("reduce_scatter", out.dtype, reduce_op)  # or it raises
        check_tensor("reduce_scatter", out)
        if out.numel() == 0:
            return
        rows, op, average = _carried(packed, reduce_op)
        rows = rows.view(self.world, -1)
        hosts, members = self._place.hosts, len(self._place.local_ranks)
        # Whose rows each rank of this host takes, in rank order as the exchange wants them.
        taken = [
            sorted(ranks[i] for ranks in hosts for i in range(local, len(ranks), members))
            for local in range(members)
        ]
        staged = rows.new_zeros(members, max(map(len, taken)), rows.shape[1])
        for local, ranks in enumerate(taken):
            staged[local, : len(ranks)] = rows[ranks]
        mine = torch.empty_like(staged[0])
        self._local.reduce_scatter(mine, staged, op)

        numel, own = rows.shape[1], taken[self._local.rank]
        senders = [ranks[self._local.rank % len(ranks)] for ranks in hosts]
        received = rows.new_empty(len(hosts), numel)
        to = [numel if rank in own else 0 for rank in range(self.world)]
        come = [numel if rank in senders else 0 for rank in range(self.world)]
        sent = mine[: len(own)].view(-1)
        options = dist.AllToAllOptions()
        self.flat.alltoall_base(received.view(-1), sent, come, to, options).wait()
        total = received[0]
        kind, reduction, _ = kind_of_reduction("reduce_scatter", total.dtype, op)
        places = [row.data_ptr() for row in received]
        _shm.reduce(places, total.data_ptr(), 0, numel, kind, reduction, False)
        _put_carried(out, total, self.world if average else 0)

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
        self.flat.alltoall_base(received, packed, sizes, [x.numel() for x in ins], options).wait()
        with torch.no_grad():
            for out, part in zip(outs, received.split(sizes), strict=True):
                out.detach().copy_(part.view(out.shape))

    def scatter(self, out: Tensor, rows: Sequence[Tensor], root: int) -> None:
        """Row p of rank ``root`` into ``out`` of rank p; ``rows`` is empty elsewhere."""
        options = dist.ScatterOptions()
        options.rootRank = root
        y = dense(out)
        inputs = [[dense(row) for row in rows]] if self.rank == root else []
        self.flat.scatter([y], inputs, options).wait()
        put_back([out], [y])

    def gather(self, rows: Sequence[Tensor], x: Tensor, root: int) -> None:
        """Rank p's ``x`` into row p of rank ``root``; ``rows`` is empty elsewhere."""
        options = dist.GatherOptions()
        options.rootRank = root
        outs = [dense(row) for row in rows]
        outputs = [outs] if self.rank == root else []
        self.flat.gather(outputs, [dense(x)], options).wait()
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
        return TransferWork(_GlooTransfer(self.flat.send([source], peer, tag), peer), source)

    def receive(self, x: Tensor, peer: int, tag: int) -> TransferWork:
        """Post a receive into ``x`` from rank ``peer``, or from ``ANY_RANK``."""
        target = dense(x)
        if peer == ANY_RANK:
            work = self.flat.recv_anysource([target], tag)
        else:
            work = self.flat.recv([target], peer, tag)
        in_place = target is x
        finish = None if in_place else lambda: x.detach().copy_(target)
        return TransferWork(_GlooTransfer(work, peer), x, finish)


def _carried(x: Tensor, reduce_op: Any) -> tuple[Tensor, Any, bool]:
    """A copy of ``x`` in what a reduction is carried in, its reduction, and whether it averages."""
    red = getattr(reduce_op, "op", reduce_op)
    average = red == _Red.AVG
    if average:
        red = _Red.SUM
    elif x.dtype == torch.bool:
        red = _OF_BOOLS.get(red, red)
    real = torch.view_as_real(dense(x)) if x.is_complex() else dense(x)
    carried = real.to(_CARRIERS.get(real.dtype, real.dtype), copy=True)
    return carried, dist.ReduceOp(red), average


def _put_carried(target: Tensor, carried: Tensor, divisor: int) -> None:
    """``carried``, divided where ``divisor`` is not 0, into ``target``, rounded to its type."""
    if divisor and carried.is_floating_point():
        carried.div_(divisor)
    elif divisor:
        carried.div_(divisor, rounding_mode="trunc")
    with torch.no_grad():
        if target.is_complex():
            carried = torch.view_as_complex(carried.view(*target.shape, 2))
        target.detach().copy_(carried.view(target.shape))


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
