"""How much memory this rank has taken: of the system on a CPU, of the allocator on a GPU."""

from __future__ import annotations

import resource
import sys
from contextlib import ExitStack

import torch

from mcp_parallel.memory.track import AllocationTracker

# ru_maxrss is in kilobytes on Linux and in bytes on macOS.
_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024


def peak_bytes(device: torch.device) -> int:
    """The most that this process has held at one time so far.

    On a CPU its resident set, shared pages included; on a GPU what torch's allocator gave out.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            # A fork begins its own count here, which getrusage takes over from the parent.
            line = next(line for line in file if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES


class StepMemory:
    """Tracks what one step allocates beyond what it began with: activations, gradients, buffers.

    On a CPU, to the byte, by a profiler of the allocator; on a GPU the peak says it.
    """

    def __init__(self) -> None:
        self._open = ExitStack()
        self._tracker = AllocationTracker()

    def start(self) -> None:
        """The step begins."""
        self._open.enter_context(self._tracker)

    def stop(self) -> int:
        """The step ends; its peak, bytes."""
        self._open.close()
        return self._tracker.peak_bytes
