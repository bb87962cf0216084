"""Ranks of one host and ranks across hosts: the two levels of a hierarchical all-reduce.

Links inside a host are fast enough for full precision; bits pay between hosts. So each rank of a
host sums its own part over the host, exchanges that part with its counterparts on the other hosts
in codes, and the host's ranks join the parts.

Letters: L = ranks of a host, H = hosts.
"""

from __future__ import annotations

import hashlib
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mcp_kernels.ops import _comm


@dataclass(frozen=True)
class HostGroups:
    """This rank's two groups; None stands for a group of one rank."""

    local: dist.ProcessGroup | None
    """The ranks of this host."""
    across: dist.ProcessGroup | None
    """The ranks with this one's place on every host."""

    @property
    def num_local(self) -> int:
        """Ranks of this host."""
        return 1 if self.local is None else self.local.size()

    @property
    def local_rank(self) -> int:
        """This rank's place on its host."""
        return 0 if self.local is None else self.local.rank()

    @staticmethod
    def discover(group: dist.ProcessGroup | None = None, host_id: str | None = None) -> HostGroups:
        """Ask every rank of ``group`` for its host and make both groups. Collective over the world.

        Args:
            group: None is the world, the only one that torch makes sub-groups of by itself.
            host_id: ranks with equal words count as one host; None takes the host's name.

        Raises:
            ValueError: hosts have different numbers of ranks.
        """
        group = dist.group.WORLD if group is None else group
        assert group is not None
        name = host_id or socket.gethostname()
        digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
        mine = torch.tensor([digest], device=device)
        ids = mine.new_empty(group.size())
        group._allgather_base(ids, mine).wait()
        members = dist.get_process_group_ranks(group)
        hosts: dict[int, list[int]] = {}
        for rank, host in zip(members, ids.tolist(), strict=True):
            hosts.setdefault(host, []).append(rank)
        sizes = sorted({len(ranks) for ranks in hosts.values()})
        if len(sizes) > 1:
            raise ValueError(
                "HostGroups.discover: every host must have the same number of ranks, got "
                f"{[len(ranks) for ranks in hosts.values()]}; use the plain group"
            )
        local = _own_group(list(hosts.values()))
        across = _own_group([list(ranks) for ranks in zip(*hosts.values(), strict=True)])
        return HostGroups(local, across)

    def local_sizes(self, numel: int) -> list[int]:
        """Elements of each local rank's part of ``numel``."""
        return _comm.split_sizes(numel, self.num_local)

    def mean_here(self, flat: Tensor) -> Tensor:
        """This rank's part of the mean of ``flat`` over the host, float32."""
        values = flat.reshape(-1).float()
        if self.local is None:
            return values
        return _comm.scatter_sum(values, self.local, 0).div_(self.num_local)

    def join(self, part: Tensor, numel: int) -> Tensor:
        """The host's parts as one ``[numel]`` tensor on each of its ranks."""
        return part if self.local is None else _comm.gather(part, self.local, 0, numel)


def _own_group(partition: list[list[int]]) -> dist.ProcessGroup | None:
    """This rank's group of a partition of the ranks; every rank makes all of them, in order."""
    own = None
    for ranks in partition:
        made = dist.new_group(ranks) if len(ranks) > 1 else None
        if dist.get_rank() in ranks:
            own = made
    return own if isinstance(own, dist.ProcessGroup) else None
