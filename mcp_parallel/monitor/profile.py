"""``--profile``: some steps of every rank as a trace that Perfetto and chrome://tracing show.

Each rank writes ``profile/rank_00000.json`` (Chrome's JSON) into the run folder, with torch's own
events and these spans around them: ``step N``, ``data``, ``forward``, ``backward``, ``F0 of stage
1`` and the like (pipeline actions), every collective and wait for a message by name, ``totals``,
``optimizer``. Times of a profiled step include the profiler's own, about a microsecond a torch op.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from mcp_kernels.spans import recording, span

# Steps before the first that is traced: they make buffers, and nobody asks how long that takes.
WARMUP_STEPS = 2


def traced_steps(first: int, last: int, count: int) -> range:
    """The ``count`` steps to trace of a run of steps ``first`` to ``last`` - 1, or fewer.

    They come after the warm-up, or earlier where the run is too short for both.
    """
    start = max(first, min(first + WARMUP_STEPS, last - count))
    return range(start, min(start + count, last))


class Profile:
    """Traces steps of one rank; does nothing for an empty range.

    Args:
        folder: of the traces; made when the first is written.
        rank: of this process.
        steps: numbers of the steps to trace, one after the other.
    """

    def __init__(self, folder: Path, rank: int, steps: range) -> None:
        self.file = folder / f"rank_{rank:05d}.json"
        self._steps = steps
        self._open = ExitStack()
        self._profiler: torch.profiler.profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The body is step ``number``."""
        if number not in self._steps:
            yield
            return
        if self._profiler is None:
            self._start()
        with span(f"step {number}"):
            yield
        if number == self._steps[-1]:
            self.close()

    def close(self) -> None:
        """End tracing and write what was traced, if anything was."""
        profiler, self._profiler = self._profiler, None
        self._open.close()
        if profiler is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self.file))

    def _start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._open.enter_context(self._profiler)
        self._open.enter_context(recording())
