"""Several ranks on one GPU: a buffer and a stream each, the multiprocessors shared out.

The kernels, the flags and the fences are those of several GPUs; what a peer's memory costs is not.
A CPU runs the kernels in Triton's interpreter one after another, so there only one rank can meet
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcp_kernels.symmetric.layout import Layout
from mcp_kernels.symmetric.peers import Peers

SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class VirtualRanks:
    """The ranks of one group, all in this process."""

    peers: list[Peers]
    buffers: list[Tensor]
    """Kept as long as the peers."""
    streams: list[torch.cuda.Stream]
    """One a rank; none on a CPU."""

    @staticmethod
    def on(device: torch.device, layout: Layout, timeout_ns: int = 5 * SECOND_NS) -> VirtualRanks:
        """``layout.world`` ranks on ``device``, with an equal share of its multiprocessors each."""
        is_gpu = device.type == "cuda"
        num_programs = 1
        if is_gpu:
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            num_programs = max(1, processors // layout.world)
        buffers = [
            torch.zeros(layout.buffer_bytes // 8, dtype=torch.int64, device=device)
            for _ in range(layout.world)
        ]
        table = torch.tensor([buffer.data_ptr() for buffer in buffers], device=device)
        peers = [
            Peers(
                rank=rank,
                layout=layout,
                buffers=table,
                error=torch.zeros(1, dtype=torch.int64, pin_memory=is_gpu),
                timeout_ns=timeout_ns,
                num_programs=num_programs,
            )
            for rank in range(layout.world)
        ]
        streams = [torch.cuda.Stream(device) for _ in peers] if is_gpu else []
        return VirtualRanks(peers, buffers, streams)

    def run(self, body: Callable[[Peers], None], ranks: Sequence[int] | None = None) -> None:
        """``body(peers)`` of each rank, at once; the caller's stream waits for all of them."""
        chosen = range(len(self.peers)) if ranks is None else ranks
        if not self.streams:
            for rank in chosen:
                body(self.peers[rank])
            return
        caller = torch.cuda.current_stream()
        for rank in chosen:
            self.streams[rank].wait_stream(caller)
            with torch.cuda.stream(self.streams[rank]):
                body(self.peers[rank])
        for rank in chosen:
            caller.wait_stream(self.streams[rank])

    def missed(self) -> list[int]:
        """The error words, after all that was started has ended."""
        if self.streams:
            torch.cuda.synchronize()
        return [int(peers.error) for peers in self.peers]
