"""Time several ways of doing one thing on forked gloo ranks: interleaved, the slowest rank counts.

A ``make(rank, world, *args)`` gives one function a name, ours first. All must give what ours gives,
which is checked before anything is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks import RankPool

Make = Callable[..., dict[str, Callable[[], torch.Tensor]]]


def compare_on_ranks(
    benchmark: Any, make: Make, *args: Any, num_bytes: float, world: int = 2, rounds: int = 40
) -> None:
    """Note the time of the first of ``make``'s functions and how many times faster it is."""
    rounds = 1 if benchmark.disabled else rounds
    pool = RankPool(world)
    try:
        per_rank = benchmark.pedantic(
            lambda: pool.run(_time_interleaved, make, args, rounds, timeout=300.0), rounds=1
        )
    finally:
        pool.close()
    times = {
        name: [max(rank[name][i] for rank in per_rank) for i in range(rounds)]
        for name in per_rank[0]
    }
    figures = {name: {"min": min(t), "median": statistics.median(t)} for name, t in times.items()}
    ours, *peers = figures
    info = benchmark.extra_info
    info["us"] = {key: round(value * 1e6, 1) for key, value in figures[ours].items()}
    info["gb_per_s"] = {
        key: float(f"{num_bytes / value / 1e9:.3g}") for key, value in figures[ours].items()
    }
    for peer in peers:
        info[f"times_faster_than_{peer}"] = {
            key: float(f"{figures[peer][key] / figures[ours][key]:.3g}") for key in figures[ours]
        }


def _time_interleaved(
    rank: int, world: int, make: Make, args: tuple[Any, ...], rounds: int
) -> dict[str, list[float]]:
    functions = make(rank, world, *args)
    expected = next(iter(functions.values()))()
    for function in functions.values():
        # Sums of a few thousand float32 products, taken in another order.
        torch.testing.assert_close(function(), expected, rtol=1e-3, atol=1e-3)
    times: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions)
    for _ in range(rounds):
        for name in order:
            dist.barrier()
            start = time.perf_counter()
            functions[name]()
            times[name].append(time.perf_counter() - start)
        order.reverse()  # whoever comes second finds weights in the cache
    return times
