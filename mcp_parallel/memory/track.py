"""The peak of what a piece of work takes from torch's CPU allocator, to the byte.

torch's profiler reports every allocation and release of the allocator, those inside of operators
included, which trackers that look at results alone (``MemTracker``) do not see. Left out is what
does not come from it: code, Python's objects, mapped files, the segments of backend ``shm``.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch.autograd.profiler import profile


class AllocationTracker:
    """Tracks allocations while entered; releases of memory from before are no part of it."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        """Most that was allocated at one time."""
        self.final_bytes = 0
        """Allocated and not released at the end."""
        self.sizes_at_peak: list[int] = []
        """Of the blocks alive at the peak, largest first."""
        self._profile = profile(profile_memory=True)

    def __enter__(self) -> AllocationTracker:
        self._profile.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._profile.__exit__(kind, error, trace)
        results = self._profile.kineto_results
        assert results is not None
        events: list[Any] = [e for e in results.events() if e.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        total, released_at_peak = 0, 0
        for index, event in enumerate(events):
            total += event.nbytes()
            if total > self.peak_bytes:
                self.peak_bytes, released_at_peak = total, index
        self.final_bytes = total
        self.sizes_at_peak = _alive([e.nbytes() for e in events[: released_at_peak + 1]])


def _alive(changes: list[int]) -> list[int]:
    """Sizes that were allocated and not released, largest first."""
    counts: dict[int, int] = {}
    for change in changes:
        counts[abs(change)] = counts.get(abs(change), 0) + (1 if change > 0 else -1)
    return sorted((s for s, count in counts.items() for _ in range(count)), reverse=True)
