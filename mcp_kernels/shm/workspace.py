"""A group's workspaces: shared slots that a matmul computes straight into.

They are made at the first fused call of their size class, by all ranks together: each tries to
reserve its segment, and all learn from each other whether every rank has one. So it is the group
that decides, once for each class, between the fused path and the reference; ``why_not`` says why
it decided against.
"""

from __future__ import annotations

import logging
import secrets
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from mcp_kernels import _shm
from mcp_kernels.shm.tensors import TYPES

_log = logging.getLogger(__name__)

# Bytes of a slot by size class; a rank has _shm.DEPTH of them. Decoding needs a few KiB and should
# not cost every group of a job megabytes; a training step gains from chunks as wide as MKL likes.
SLOT_BYTES = (128 << 10, 2 << 20)
_RECORD = 256  # bytes of what ranks tell each other: a segment's name, or why there is none
_FAILED = "!"
_MOST_VIEWS = 512
_OPS = {name: getattr(_shm.Op, name) for name in ("matmul_reduce_scatter", "all_gather_matmul")}


@dataclass(slots=True)
class Workspace:
    """The compiled workspace, and its slots as tensors."""

    shm: _shm.Workspace
    group: _shm.Group
    rank: int
    world: int
    slot_bytes: int
    lock: threading.Lock
    memory: Tensor
    """All of this rank's slots, uint8."""
    views: dict[tuple[int, torch.dtype, int, int], Tensor]

    def slot(self, index: int, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
        """``[rows, columns]`` at the start of slot ``index``, contiguous."""
        key = (index, dtype, rows, columns)
        view = self.views.get(key)
        if view is None:
            if len(self.views) >= _MOST_VIEWS:  # shapes that change for ever must not pile up
                self.views.clear()
            begin = index * self.slot_bytes
            part = self.memory[begin : begin + rows * columns * dtype.itemsize]
            view = self.views[key] = part.view(dtype).view(rows, columns)
        return view

    def begin_sum(
        self,
        op: str,
        rows: int,
        columns: int,
        region: tuple[int, int, int, int, int],
        out: Tensor,
        bias: Tensor | None,
        in_stages: bool,
    ) -> int:
        """The slot for the first block of a product; csrc/shm/workspace.h has the rest.

        Args:
            op: name of the op.
            rows: of the product.
            columns: of the product.
            region: period, first, count, first column, number of columns.
            out: contiguous; what the region comes to.
            bias: contiguous ``[columns]``.
            in_stages: whether the ranks share the work.
        """
        return self.shm.begin_sum(
            _OPS[op],
            TYPES[out.dtype],
            rows,
            columns,
            *region,
            out.data_ptr(),
            region[4],
            0 if bias is None else bias.data_ptr(),
            in_stages,
        )

    def begin_gather(self, op: str, outer: int, runs: list[int], out: Tensor) -> int:
        """The slot for this rank's first piece.

        Args:
            op: name of the op.
            outer: runs of each rank.
            runs: elements of a run, by rank.
            out: contiguous; an outer index holds one run of every rank.
        """
        size = out.element_size()
        sizes = [run * size for run in runs]
        kind = TYPES[out.dtype]
        return self.shm.begin_gather(_OPS[op], kind, outer, sizes, out.data_ptr(), sum(sizes))


class Workspaces:
    """The workspaces of one process group, one a size class.

    Args:
        group: the compiled group; all ranks stand on one host.
        rank: of this process.
        world: ranks of the group.
    """

    def __init__(self, group: _shm.Group, rank: int, world: int) -> None:
        self._group = group
        self._rank = rank
        self._world = world
        self._made: list[Workspace | str | None] = [None] * len(SLOT_BYTES)

    def of(self, num_bytes: int) -> Workspace | None:
        """For a result of ``num_bytes``; None where the group decided against.

        Every rank of the group calls it in the same call of an op.

        Raises:
            RuntimeError: a rank died or makes another call.
        """
        index = size_class(num_bytes)
        made = self._made[index]
        if made is None:
            made = self._made[index] = self._make(index)
        return made if isinstance(made, Workspace) else None

    def why_not(self, num_bytes: int) -> str | None:
        """The reason why the group has none for a result of ``num_bytes``; None before it tried."""
        made = self._made[size_class(num_bytes)] if num_bytes else None
        return made if isinstance(made, str) else None

    def _make(self, index: int) -> Workspace | str:
        rank, world, size = self._rank, self._world, SLOT_BYTES[index]
        made: _shm.Workspace | None = None
        try:
            made = _shm.Workspace(self._group, secrets.token_hex(16), size)
            record = made.segment_name
        except OSError as error:
            record = f"{_FAILED}rank {rank}: no room for slots of {size} bytes, {error.strerror}"
        names = _exchange(self._group, record, world)
        failed = [name[1:] for name in names if name.startswith(_FAILED)]
        if made is None or failed:
            reason = f"{failed[0]}; enlarge /dev/shm (docker run --shm-size=1g)"
            _log.warning("shm workspace: %s; the reference runs instead", reason)
            return reason
        made.connect(names)
        memory = torch.frombuffer(memoryview(made), dtype=torch.uint8)
        return Workspace(made, self._group, rank, world, size, threading.Lock(), memory, {})


def size_class(num_bytes: int) -> int:
    """Which workspace a result of ``num_bytes`` takes."""
    return 0 if num_bytes <= SLOT_BYTES[0] else 1


def _exchange(group: _shm.Group, record: str, world: int) -> list[str]:
    """Each rank's record, on every rank."""
    mine = torch.zeros(_RECORD, dtype=torch.uint8)
    raw = record.encode()[:_RECORD]
    mine[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    rows = torch.empty(world, _RECORD, dtype=torch.uint8)
    places = [row.data_ptr() for row in rows]
    group.all_gather(mine.data_ptr(), places, _RECORD)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
