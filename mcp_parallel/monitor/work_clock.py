"""How long a rank works on its own in a step, without what it spends on other ranks.

In a synchronous step all ranks take as long as the slowest: wall time names nobody. What differs is
the time outside of collectives, messages and waits, inside of fused ops too where ranks share
memory, and inside of ``fully_shard`` (``parallel.seen_waits``). Left in is its sum over replicas
of shards (``parallel.dp_replicate``) over gloo, which torch makes out of sight: there a slow rank
makes those of other replicas look slow as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from mcp_kernels.spans import Recorder, metering
from mcp_parallel.parallel.mesh import Mesh


class WorkClock:
    """Measures the steps of one rank while ``running``; says nothing at other times.

    On a GPU it never does: the host only launches there, and its time is not the device's.

    Args:
        mesh: this rank's.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._device = mesh.device
        self._rank, self._world = 0, 1
        if mesh.world is not None:
            self._rank, self._world = torch.distributed.get_rank(), mesh.layout.world_size
        self._meter: Recorder | None = None
        self._start_s: float | None = None
        self._communication_s = 0.0

    @property
    def num_figures(self) -> int:
        """Length of ``own_s_by_rank``, the same on all ranks."""
        return 0 if self._meter is None else self._world

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure from ``start`` to ``start`` inside."""
        if self._device.type != "cpu":
            yield
            return
        with metering(_shared_memory_waits()) as self._meter:
            try:
                yield
            finally:
                self._meter = self._start_s = None

    def start(self) -> None:
        """A step begins, the reading of its data included."""
        if self._meter is not None:
            self._meter.take_communication_s()
            self._communication_s = 0.0
            self._start_s = time.perf_counter()

    def own_s_by_rank(self, unseen_s: float = 0.0) -> list[float]:
        """Seconds of this rank's own work since ``start`` at its place, zero at all others'.

        Args:
            unseen_s: of waiting that only a pipeline's clock has seen.
        """
        figures = [0.0] * self.num_figures
        if self._meter is not None and self._start_s is not None:
            elapsed_s = time.perf_counter() - self._start_s
            self._communication_s += unseen_s
            figures[self._rank] = max(0.0, elapsed_s - self._take())
        return figures

    def communication_share(self) -> float | None:
        """Part of the step that this rank communicated or waited, once it has ended."""
        if self._meter is None or self._start_s is None:
            return None
        self._take()
        return self._communication_s / (time.perf_counter() - self._start_s)

    def _take(self) -> float:
        assert self._meter is not None
        self._communication_s += self._meter.take_communication_s()
        return self._communication_s


def _shared_memory_waits() -> Callable[[], float]:
    """Counts what fused ops wait for in shared memory; nothing where that was not built."""
    try:
        from mcp_kernels import _shm
    except ImportError:
        return lambda: 0.0
    return _shm.waited_s
