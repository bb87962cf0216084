"""Ranks that are slower than their peers, by the time of their own work. No torch.

A rank is held against the ranks of the same pipeline stage, which do the same work, or shares of it
that are meant to take equally long (``parallel.dp_shares``); where it has none, against the other
stages by the model's own work. It is named when it was slower in nearly all of the last steps: a
hiccup names nobody, and neither does the noise of a machine that hits now one and now another.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from mcp_parallel.config import Config
from mcp_parallel.layout import Layout
from mcp_parallel.monitor.throughput import stage_flops
from mcp_parallel.monitor.verdicts import Finding

# Stages of a pipeline are told apart by counting products alone, which leaves out the loss, norms
# and memory: the times of equal ranks differ by up to this factor more.
_UNLIKE = 2.0
# Part of the steps in which a straggler is slow. Where chance makes a rank slow in four steps of
# ten, it does so in 18 of 20 once in 200,000 times.
_NEARLY_ALL = 0.9


class Stragglers:
    """Watches the ranks' own work.

    Args:
        config: the run; says how many steps and how much slower.
        hosts: name of each rank's host.
    """

    def __init__(self, config: Config, hosts: Sequence[str]) -> None:
        layout = Layout.from_config(config.parallel)
        factor = config.monitor.straggler_factor
        self._num_steps = config.monitor.straggler_steps
        self._hosts = hosts
        places = [layout.coordinate(rank) for rank in range(layout.world_size)]
        self._is_alike = layout.world_size > layout.pp
        work = [1.0 if self._is_alike else stage_flops(config, pp) for pp in range(layout.pp)]
        self._work = [work[place.pp] for place in places]
        self._groups: dict[int, list[int]] = {}
        for rank, place in enumerate(places):
            self._groups.setdefault(place.pp if self._is_alike else 0, []).append(rank)
        self._limit = factor * (1.0 if self._is_alike else _UNLIKE)
        self._fewest = math.ceil(_NEARLY_ALL * self._num_steps)
        self._ratios: list[deque[float]] = [deque() for _ in places]
        self._num_slow = [0] * len(places)

    def add(self, own_s: Sequence[float]) -> list[Finding]:
        """Take in a step's times by rank; the ranks that are slow by now."""
        if len(self._ratios) < 2:
            return []
        pace = [seconds / work for seconds, work in zip(own_s, self._work, strict=True)]
        for group in self._groups.values():
            ordered = sorted(group, key=lambda rank: pace[rank])
            for place, rank in enumerate(ordered):
                usual = pace[_median_of_others(ordered, place)]
                self._note(rank, pace[rank] / usual if usual > 0 else 1.0)
        return [
            self._finding(rank, own_s[rank])
            for rank, num_slow in enumerate(self._num_slow)
            if num_slow >= self._fewest
        ]

    def _note(self, rank: int, ratio: float) -> None:
        ratios = self._ratios[rank]
        ratios.append(ratio)
        self._num_slow[rank] += ratio > self._limit
        if len(ratios) > self._num_steps:
            self._num_slow[rank] -= ratios.popleft() > self._limit

    def _finding(self, rank: int, seconds: float) -> Finding:
        host, ratio = self._hosts[rank], statistics.median(self._ratios[rank])
        return Finding(
            kind="straggler",
            what=f"rank {rank} on host {host} works {seconds:.3g} s a step, {ratio:.1f} times what "
            f"its peers do, for {self._num_steps} steps",
            cause="a core or GPU that is shared, throttled or failing, or slow storage there",
            advice=f"look at what else runs on {host}, run mcp-parallel doctor there, or leave "
            "that host out",
            where=f"rank {rank}",
            host=host,
            value=ratio,
            high=self._limit,
        )


def _median_of_others(ordered: Sequence[int], place: int) -> int:
    """The rank in the middle of all but that at ``place``, the slower of two."""
    middle = (len(ordered) - 1) // 2
    return ordered[middle if middle < place else middle + 1]
