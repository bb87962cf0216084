"""Batches made while the step before them runs."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from numpy.typing import NDArray

from mcp_parallel.config import Config
from mcp_parallel.data.source import Source, documents_of

# Two steps ahead hide a block that takes as long as a step to fetch, or to check.
_DEPTH = 2


class Batch(NamedTuple):
    """A rank's rows of a step."""

    inputs: NDArray[Any]
    targets: NDArray[Any]
    documents: NDArray[Any] | None


class Ahead:
    """The batches of a run in the order of its steps, made by a thread ahead of time.

    They are those of ``source``, whatever was made before: a step that nobody foresaw is made when
    it is asked for.

    Args:
        source: of the run.
        config: of the run.
        depth: how many steps ahead are made; 0 makes each when it is asked for.
    """

    def __init__(self, source: Source, config: Config, depth: int = _DEPTH) -> None:
        self._source, self._config, self._depth = source, config, depth
        self._made: dict[int, Future[Batch]] = {}
        self._rows: range | None = None
        self._pool: ThreadPoolExecutor | None = None
        self.waited_s = 0.0
        """How long the last ``take`` took."""

    def take(self, step: int, rows: range) -> Batch:
        """The batch of a step; what its making raised is raised here.

        Args:
            step: steps before it.
            rows: of the global batch.
        """
        start = time.perf_counter()
        if rows != self._rows:
            self._made, self._rows = {}, rows
        ready = self._made.pop(step, None)
        batch = self._make(step, rows) if ready is None else ready.result()
        self._foresee(step, rows)
        self.waited_s = time.perf_counter() - start
        return batch

    def close(self) -> None:
        """Let go of what was made and is not wanted any more."""
        self._made = {}
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _foresee(self, step: int, rows: range) -> None:
        last = min(step + self._depth, self._config.train.steps - 1)
        wanted = range(step + 1, last + 1)
        self._made = {at: future for at, future in self._made.items() if at in wanted}
        for at in wanted:
            if at not in self._made:
                # One thread, made in the rank: a fork would not have it.
                self._pool = self._pool or ThreadPoolExecutor(1, "mcp-data")
                self._made[at] = self._pool.submit(self._make, at, rows)

    def _make(self, step: int, rows: range) -> Batch:
        inputs, targets = self._source.batch(step, rows)
        return Batch(inputs, targets, documents_of(self._source, self._config, step, rows))
