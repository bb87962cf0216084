"""One rank's view of its group's buffers: what every kernel of a channel is started with."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mcp_kernels.symmetric.layout import Layout


@dataclass(frozen=True, slots=True)
class Peers:
    """The buffers of a channel, as mapped on this rank."""

    rank: int
    layout: Layout
    buffers: Tensor
    """``[W]`` int64 on the device: where each rank's buffer is mapped here."""
    error: Tensor
    """``[1]`` int64 that the host reads without waiting for the device: pinned memory."""
    timeout_ns: int
    num_programs: int
    """Most programs of a launch: what the group's smallest GPU holds at once, or less."""
    multicast: int = 0
    """Address of all buffers at once; 0 where the fabric has no multicast."""

    @property
    def world(self) -> int:
        """Ranks of the group."""
        return self.layout.world

    @property
    def lanes(self) -> int:
        """``world`` as a power of two: what ``tl.arange`` takes."""
        return 1 << (self.world - 1).bit_length()
