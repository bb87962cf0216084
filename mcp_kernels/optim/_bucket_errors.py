"""Errors of DDP's buckets that survive a new layout of the buckets.

The worker's errors of a bucket are one flat tensor with whole blocks for each parameter. The
server's part of a rank is a chunk of it, which may begin and end inside a parameter; when buckets
change, the ranks put their chunks together once, and each takes its new ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcp_kernels.ops import _comm
from mcp_kernels.ops.block_layout import BlockLayout
from mcp_kernels.ops.compressed_all_reduce import ErrorState


@dataclass(frozen=True)
class _Bucket:
    names: tuple[str, ...]
    layout: BlockLayout
    errors: ErrorState

    def parts(self, flat: Tensor) -> dict[str, Tensor]:
        """The blocks of each parameter in a buffer of this bucket."""
        block = self.layout.block_size
        return {
            name: flat[at : at + blocks * block]
            for name, at, blocks in zip(
                self.names, self.layout.offsets, self.layout.blocks, strict=True
            )
        }


class BucketErrors:
    """The errors of all buckets on one rank.

    Args:
        group: ranks that average; None is this rank alone, which has no errors.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self._buckets: list[_Bucket] = []
        self._loose: dict[str, tuple[Tensor, Tensor]] = {}  # (worker, server), whole, by name

    def of_bucket(
        self, names: Sequence[str], layout: BlockLayout, device: torch.device
    ) -> ErrorState:
        """The errors of the bucket of these parameters; collective when buckets have changed."""
        for bucket in self._buckets:
            if bucket.names == tuple(names):
                return bucket.errors
        if any(set(bucket.names) & set(names) for bucket in self._buckets):
            self._take_apart()
        worker = torch.zeros(layout.padded_numel, device=device)
        server = torch.zeros_like(worker)
        bucket = _Bucket(tuple(names), layout, ErrorState(worker, server))
        for flat, which in ((worker, 0), (server, 1)):
            for name, part in bucket.parts(flat).items():
                if name in self._loose:
                    part.copy_(self._loose[name][which])
        for name in names:
            self._loose.pop(name, None)
        rank = 0 if self.group is None else self.group.rank()
        bucket.errors.server_error = _own_chunk(server, layout, rank)
        self._buckets.append(bucket)
        return bucket.errors

    def _take_apart(self) -> None:
        """All errors by parameter, the server's put together from all ranks."""
        for bucket in self._buckets:
            server = bucket.errors.server_error
            if self.group is not None:
                server = _comm.gather(server, self.group, 0)
            servers = bucket.parts(server)
            for name, worker in bucket.parts(bucket.errors.worker_error).items():
                self._loose[name] = worker, servers[name]
        self._buckets = []

    def state_dict(self) -> dict[str, Any]:
        """This rank's errors: buckets with the worker's errors and the server's own chunk."""
        return {
            "buckets": [
                {
                    "names": list(bucket.names),
                    "sizes": list(bucket.layout.sizes),
                    "worker_error": bucket.errors.worker_error.clone(),
                    "server_error": bucket.errors.server_error.clone(),
                }
                for bucket in self._buckets
            ],
            "loose": {
                name: [worker.clone(), server.clone()]
                for name, (worker, server) in self._loose.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all errors by those of ``state``."""
        world = 1 if self.group is None else self.group.size()
        self._buckets = [
            _Bucket(
                tuple(saved["names"]),
                BlockLayout(saved["sizes"], state["block_size"], world),
                ErrorState(saved["worker_error"].clone(), saved["server_error"].clone()),
            )
            for saved in state["buckets"]
        ]
        self._loose = {
            name: (pair[0].clone(), pair[1].clone()) for name, pair in state["loose"].items()
        }

    @staticmethod
    def reshard(
        states: Sequence[Mapping[str, Any]], block_size: int, world_size: int, rank: int
    ) -> dict[str, Any]:
        """``state_dict`` of one of ``world_size`` ranks from those of all old ranks."""
        buckets = []
        for index, first in enumerate(states[0]["buckets"]):
            olds = [state["buckets"][index] for state in states]
            layout = BlockLayout(first["sizes"], block_size, world_size)
            workers = torch.stack([old["worker_error"].double() for old in olds]).mean(0)
            server = torch.cat([old["server_error"] for old in olds])
            buckets.append(
                {
                    **first,
                    "worker_error": fitted(workers.float(), layout.padded_numel),
                    "server_error": _own_chunk(fitted(server, layout.padded_numel), layout, rank),
                }
            )
        loose = {}
        for name, (_, server) in states[0]["loose"].items():
            workers = torch.stack([state["loose"][name][0].double() for state in states]).mean(0)
            loose[name] = [workers.float(), server]
        return {"buckets": buckets, "loose": loose}


def _own_chunk(flat: Tensor, layout: BlockLayout, rank: int) -> Tensor:
    return flat[rank * layout.chunk_numel :][: layout.chunk_numel].clone()


def fitted(flat: Tensor, numel: int, value: float = 0.0) -> Tensor:
    """``flat`` with ``value`` at its end, or with less of the padding there: ``numel`` elements."""
    room = max(0, numel - flat.numel())
    return torch.nn.functional.pad(flat, (0, room), value=value)[:numel].clone()
