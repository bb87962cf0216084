"""How long a rank worked and how long it waited, from timestamps around its actions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch

from mcp_kernels.spans import metered_s


@dataclass(frozen=True)
class Occupation:
    """One rank's share of work in one run of the pipeline."""

    busy_s: float
    """Inside forwards, losses and backwards; a tensor-parallel collective is part of them."""
    wall_s: float
    """From the start of the run to the end of its last action and message."""
    unseen_s: float = 0.0
    """Part of the waiting that ``spans.metering`` did not see: torch's own messages over gloo."""


@dataclass
class Clock:
    """Marks time on the device that works: on a GPU by events, for the host only launches there.

    Cost: two marks an action (a microsecond on a CPU), and on a GPU one wait for the last event,
    where the step waits for its loss anyway.
    """

    device: torch.device
    _spans: list[tuple[object, object]] = field(default_factory=list)
    _began: object = None
    _metered_s: float = 0.0
    _metered_at_work_s: float = 0.0

    def start(self) -> None:
        """Forget the last run and begin one."""
        self._spans = []
        self._metered_s, self._metered_at_work_s = metered_s(), 0.0
        self._began = self._mark()

    @contextmanager
    def working(self) -> Iterator[None]:
        """The body is work."""
        before, metered = self._mark(), metered_s()
        yield
        self._spans.append((before, self._mark()))
        self._metered_at_work_s += metered_s() - metered

    def stop(self) -> Occupation:
        """End the run that ``start`` began."""
        end = self._mark()
        if isinstance(end, torch.cuda.Event):
            end.synchronize()
        busy_s = sum(self._seconds(before, after) for before, after in self._spans)
        wall_s = self._seconds(self._began, end)
        waited_s = metered_s() - self._metered_s - self._metered_at_work_s
        return Occupation(busy_s, wall_s, max(0.0, wall_s - busy_s - waited_s))

    def _mark(self) -> object:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, before: object, after: object) -> float:
        if isinstance(before, torch.cuda.Event) and isinstance(after, torch.cuda.Event):
            return before.elapsed_time(after) / 1e3
        return cast("float", after) - cast("float", before)


def bubbles(occupations: list[Occupation]) -> tuple[float, ...]:
    """Idle fraction of each pipeline rank: 1 - busy / makespan, the longest wall time of all.

    Args:
        occupations: of each pipeline rank, in one run that all of them began together.
    """
    makespan_s = max(occupation.wall_s for occupation in occupations)
    if makespan_s <= 0:
        return tuple(0.0 for _ in occupations)
    return tuple(1 - occupation.busy_s / makespan_s for occupation in occupations)
