"""Time several ways of doing one thing on forked ranks: interleaved, the slowest rank counts.

A ``make(rank, world, *args)`` gives one function a name, ours first. All must give what ours gives,
which is checked before anything is timed; but for those whose name begins with ``bare``, a part of
the work that nobody can be faster than. The default group is of gloo; ``shm_group`` gives the other
one. Each rank is pinned to a core where there are as many, and rounds begin at a barrier in shared
memory: gloo lets its ranks go tens of microseconds apart.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks import RankPool

Make = Callable[..., dict[str, Callable[[], torch.Tensor]]]


def shm_group(world: int) -> Any:
    """A group in shared memory; None where that was not built."""
    with contextlib.suppress(ImportError):
        import mcp_kernels.shm  # noqa: F401 (registers the backend)

        return dist.new_group(list(range(world)), backend="shm")
    return None


def compare_on_ranks(
    benchmark: Any, make: Make, *args: Any, num_bytes: float, world: int = 2, rounds: int = 40
) -> None:
    """Note the time of the first of ``make``'s functions and how many times faster it is.

    All functions must give the same, which is checked first.
    """
    _run(benchmark, make, args, num_bytes, world, rounds, check=True)


def time_on_ranks(
    benchmark: Any, make: Make, *args: Any, num_bytes: float, world: int = 2, rounds: int = 40
) -> None:
    """As ``compare_on_ranks`` for functions that round differently; ``make`` checks them itself."""
    _run(benchmark, make, args, num_bytes, world, rounds, check=False)


def _run(
    benchmark: Any,
    make: Make,
    args: tuple[Any, ...],
    num_bytes: float,
    world: int,
    rounds: int,
    *,
    check: bool,
) -> None:
    rounds = 1 if benchmark.disabled else rounds
    pool = RankPool(world)
    try:
        per_rank = benchmark.pedantic(
            lambda: pool.run(_time_interleaved, make, args, rounds, check, timeout=300.0), rounds=1
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
    quartiles = {name: sorted(t)[len(t) // 4] for name, t in times.items()}
    info["us"] = {key: round(value * 1e6, 1) for key, value in figures[ours].items()}
    info["gb_per_s"] = {
        key: float(f"{num_bytes / value / 1e9:.3g}") for key, value in figures[ours].items()
    }
    for peer in peers:
        if peer.startswith("bare"):
            low = {"min": figures[peer]["min"], "median": quartiles[peer]}
            high = {"min": figures[ours]["min"], "median": quartiles[ours]}
            info[f"times_{peer} (min / p25)"] = {k: round(high[k] / low[k], 3) for k in low}
            continue
        info[f"times_faster_than_{peer}"] = {
            key: float(f"{figures[peer][key] / figures[ours][key]:.3g}") for key in figures[ours]
        }


def _time_interleaved(
    rank: int, world: int, make: Make, args: tuple[Any, ...], rounds: int, check: bool
) -> dict[str, list[float]]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= world:
        os.sched_setaffinity(0, {cores[rank]})
    meeting: Any = shm_group(world) or dist.group.WORLD
    functions = make(rank, world, *args)
    expected = next(iter(functions.values()))()
    for name, function in functions.items():
        if name.startswith("bare") or not check:
            continue
        # Sums of a few thousand float32 products, taken in another order.
        tolerance = 1e-3 if expected.dtype == torch.float32 else 4e-2
        scale = expected.abs().max().item()
        torch.testing.assert_close(function(), expected, rtol=tolerance, atol=tolerance * scale)
    times: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions)
    for _ in range(rounds):
        for name in order:
            meeting.barrier()
            start = time.perf_counter()
            functions[name]()
            times[name].append(time.perf_counter() - start)
        order.reverse()  # whoever comes second finds weights in the cache
    return times
