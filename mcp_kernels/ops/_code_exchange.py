"""All-to-all, reduce, all-gather of codes: the wire under every compressed all-reduce.

Rank j owns chunk j: it receives every rank's codes of that chunk, reduces them in float32 and codes
the mean again; then everybody gets everybody's chunk. Two collectives, whatever the size. A rank's
codes of one chunk and their scales travel as one row of bytes::

    [scales: 4 bytes a block][codes][up to 3 bytes to the next multiple of 4][extra]

A block that was not finite on any rank has a NaN scale in the gathered rows, on every rank: the
finite flag costs no byte. ``extra`` is what the owner of a chunk adds to its row of the second
collective (ZeRO-1: the updated parameters).

Letters: W = ranks, B = blocks of a chunk, N = elements of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mcp_kernels.ops._codecs import Codec
from mcp_kernels.ops._comm import split_sizes

# Backends whose process groups have alltoall_base; any other exchanges by sends and receives.
_HAVE_ALL_TO_ALL = frozenset({"gloo", "nccl", "shm", "mpi", "xccl", "hccl"})


@dataclass(frozen=True, slots=True)
class Chunks:
    """How a flat tensor is cut among the ranks, as ``torch.chunk`` cuts it, and into blocks."""

    numel: int
    world: int
    block_size: int
    codec: Codec

    @property
    def step(self) -> int:
        """Elements of a full chunk."""
        return -(-self.numel // self.world)

    @property
    def sizes(self) -> list[int]:
        """Elements of each rank's chunk; the last ones may be shorter or empty."""
        return split_sizes(self.numel, self.world)

    @property
    def is_whole(self) -> bool:
        """Whether every chunk is the same number of whole blocks: codes of all are one run."""
        return self.step * self.world == self.numel and self.step % self.block_size == 0

    def num_blocks(self, size: int) -> int:
        """Blocks of a chunk of ``size`` elements."""
        return -(-size // self.block_size)

    @property
    def scale_bytes(self) -> int:
        """Bytes of a row's scales."""
        return 4 * self.num_blocks(self.step)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, a multiple of 4 so that the next row's scales are aligned."""
        return self.scale_bytes + -(-self.codec.code_bytes(self.step) // 4) * 4

    def write(self, row: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Put one chunk's scales and codes into its row, uint8 ``[row_bytes]``."""
        row[: 4 * scales.numel()].view(torch.float32).copy_(scales)
        row[self.scale_bytes :][: codes.numel()].copy_(codes)

    def write_all(self, rows: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Put the codes and scales of whole chunks, one run each, into all rows."""
        size = self.codec.code_bytes(self.step)
        rows[:, : self.scale_bytes].view(torch.float32).copy_(scales.view(self.world, -1))
        rows[:, self.scale_bytes :][:, :size].copy_(codes.view(self.world, -1))

    def read(self, rows: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Codes ``[W, bytes]`` and scales ``[W, B]``, contiguous, of rows of chunks of ``size``."""
        codes = rows[:, self.scale_bytes :][:, : self.codec.code_bytes(size)]
        scales = rows[:, : 4 * self.num_blocks(size)]
        return codes.contiguous(), scales.contiguous().view(torch.float32)


def wire_bytes(numel: int, world: int, codec: Codec, block_size: int = 1024) -> int:
    """Bytes that one rank sends in one compressed all-reduce of ``numel`` elements."""
    return 2 * (world - 1) * Chunks(numel, world, block_size, codec).row_bytes


def uncompressed_bytes(numel: int, world: int) -> int:
    """Bytes that one rank sends in a bandwidth-optimal float32 all-reduce of ``numel`` elements."""
    return 2 * (world - 1) * 4 * -(-numel // world)


class CodeExchange:
    """Codes on their way. The all-to-all starts here; ``advance`` starts the all-gather.

    Every rank must make, advance and wait for its exchanges in the same order; ``advance`` and
    ``wait`` may be called again.

    Args:
        chunks: the geometry.
        rows: uint8 ``[W, row_bytes]``, row j filled with this rank's codes of chunk j.
        server_error: float32, this rank's chunk, updated in place by ``advance``.
        group: the ranks; None is this rank alone, and then nothing moves and ``server_error``
            stays as it is: what was coded once needs no second coding.
        counts: int32 ``[B]``, elements of each of this rank's blocks; None counts them all.
        may_all_to_all: False exchanges by sends and receives whatever the backend has.
    """

    def __init__(
        self,
        chunks: Chunks,
        rows: Tensor,
        server_error: Tensor,
        group: dist.ProcessGroup | None,
        *,
        counts: Tensor | None = None,
        may_all_to_all: bool = True,
    ) -> None:
        self.chunks = chunks
        self._rows = rows
        self._server_error = server_error
        self._group = group
        self._counts = counts
        self._work: dist.Work | None = None
        self._sends: list[dist.Work] = []
        self._reduced = False
        if group is None or rows.numel() == 0:
            self._reduced = True
            return
        self._received = torch.empty_like(rows)
        if may_all_to_all and group._get_backend(rows.device).name().lower() in _HAVE_ALL_TO_ALL:
            options = dist.AllToAllOptions()
            self._work = group.alltoall_base(self._received, rows, [], [], options)
        else:
            self._sends = _exchange_by_pairs(self._received, rows, group)

    def receive(self) -> Tensor:
        """Wait for the all-to-all: every rank's row of this rank's chunk, uint8 ``[W, row_bytes]``.

        Needs a group.
        """
        self._wait()
        return self._received

    def reduce(self) -> tuple[Tensor, Tensor]:
        """Wait for the all-to-all and reduce this rank's chunk: its codes and scales.

        Only for a caller that adds to its row: it goes on with ``gather``. Needs a group.
        """
        assert self._group is not None
        self.receive()
        size = self.chunks.sizes[self._group.rank()]
        codes, scales = self.chunks.read(self._received, size)
        return self.chunks.codec.reduce(
            codes, scales, self._server_error, self._counts, self.chunks.block_size
        )

    def gather(self, codes: Tensor, scales: Tensor, extra: Tensor | None = None) -> None:
        """Start the all-gather of the reduced chunks, each with its rank's ``extra`` bytes."""
        assert self._group is not None
        length = self.chunks.row_bytes
        row = self._rows.new_zeros(length + (0 if extra is None else extra.numel()))
        self.chunks.write(row[:length], codes, scales)
        if extra is not None:
            row[length:].copy_(extra)
        self._rows = row.new_empty(self._group.size(), row.numel())
        self._work = self._group._allgather_base(self._rows.view(-1), row)
        self._reduced = True

    def advance(self) -> None:
        """Wait for the all-to-all, reduce, start the all-gather."""
        if not self._reduced:
            self.gather(*self.reduce())

    def wait(self) -> Tensor:
        """Wait for everything: uint8 ``[W, row_bytes + extra]``, the mean's codes by chunk."""
        self.advance()
        self._wait()
        return self._rows

    def _wait(self) -> None:
        for work in self._sends:
            work.wait()
        if self._work is not None:
            self._work.wait()
        self._sends, self._work = [], None


def _exchange_by_pairs(received: Tensor, rows: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
    """All-to-all of rows where the backend has none: W - 1 sends and receives."""
    rank = group.rank()
    received[rank].copy_(rows[rank])
    peers = [peer for peer in range(group.size()) if peer != rank]
    receives = [group.recv([received[peer]], peer, 0) for peer in peers]
    return receives + [group.send([rows[peer]], peer, 0) for peer in peers]
