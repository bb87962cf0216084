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
        self._factor = config.monitor.straggler_factor
        self._num_steps = config.monitor.straggler_steps
        self._hosts = hosts
        places = [layout.coordinate(rank) for rank in range(layout.world_size)]
        self._is_alike = layout.world_size > layout.pp
        work = [1.0 if self._is_alike else stage_flops(config, pp) for pp in range(layout.pp)]
        self._work = [work[place.pp] for place in places]
        self._groups: dict[int, list[int]] = {}
        for rank, place in enumerate(places):
            self._groups.setdefault(place.pp if self._is_alike else 0, []).append(rank)
        self._ratios: list[deque[float]] = [deque(maxlen=self._num_steps) for _ in places]

    def add(self, own_s: Sequence[float]) -> list[Finding]:
        """Take in a step's times by rank; the ranks that are slow by now."""
        if len(self._ratios) < 2:
            return []
        pace = [seconds / work for seconds, work in zip(own_s, self._work, strict=True)]
        for group in self._groups.values():
            ordered = sorted(group, key=lambda rank: pace[rank])
            for rank in group:
                usual = pace[_median_of_others(ordered, rank)]
                self._ratios[rank].append(pace[rank] / usual if usual > 0 else 1.0)
        limit = self._factor * (1.0 if self._is_alike else _UNLIKE)
        fewest = math.ceil(_NEARLY_ALL * self._num_steps)
        return [
            self._finding(rank, own_s[rank], statistics.median(ratios), limit)
            for rank, ratios in enumerate(self._ratios)
            if sum(ratio > limit for ratio in ratios) >= fewest
        ]

    def _finding(self, rank: int, seconds: float, ratio: float, limit: float) -> Finding:
        host = self._hosts[rank]
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
            high=limit,
        )


def _median_of_others(ordered: list[int], rank: int) -> int:
    """The rank in the middle of the others, the slower of two."""
    others = [other for other in ordered if other != rank]
    return others[len(others) // 2]
