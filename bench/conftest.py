"""Benchmarks: one thread, peers and a floor kernel interleaved with ours, ratios in one run.

A machine's speed moves by 2x within minutes, so a time means nothing beside a time of another run.
Every round runs each peer once and ours once; what is reported is ours over theirs, by the minimum
and by the median.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

with warnings.catch_warnings():
    # The header below says what was built; a pure-Python installation is measured as it is.
    warnings.simplefilter("ignore", RuntimeWarning)
    import mcp_kernels


@dataclass
class Peer:
    """Something to stand beside ours: what it runs and how many bytes that moves (0: not told)."""

    run: Callable[[], object]
    num_bytes: float = 0.0


def pytest_addoption(parser):
    parser.addoption("--threads", type=int, default=1, help="torch threads (default 1)")


def pytest_configure(config):
    torch.set_num_threads(config.getoption("--threads"))


def pytest_report_header(config):
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    return [
        f"threads: {torch.get_num_threads()} of {os.cpu_count()} cores; load average: {load}",
        *str(mcp_kernels.build_info()).splitlines(),
    ]


@pytest.fixture
def compare(benchmark):
    """``compare(ours, num_bytes, peers)``: time ours beside its peers, note GB/s and ratios."""

    def run(ours, num_bytes, peers, rounds=15):
        peer_times = {name: [] for name in peers}

        def run_peers():
            for name, peer in peers.items():
                start = time.perf_counter()
                peer.run()
                peer_times[name].append(time.perf_counter() - start)

        benchmark.pedantic(ours, setup=run_peers, rounds=rounds, warmup_rounds=2)
        if benchmark.disabled:
            return
        stats, info = benchmark.stats.stats, benchmark.extra_info
        ours_time = {"min": stats.min, "median": stats.median}
        info["gb_per_s"] = _round({k: num_bytes / t / 1e9 for k, t in ours_time.items()})
        for name, peer in peers.items():
            times = peer_times[name][2:]  # without the warm-up rounds
            peer_time = {"min": min(times), "median": statistics.median(times)}
            info[f"times_faster_than_{name}"] = _round(
                {k: peer_time[k] / ours_time[k] for k in ours_time}
            )
            if peer.num_bytes:
                info[f"bandwidth_over_{name}"] = _round(
                    {
                        k: num_bytes / ours_time[k] / (peer.num_bytes / peer_time[k])
                        for k in ours_time
                    }
                )

    return run


def _round(values):
    return {name: float(f"{value:.3g}") for name, value in values.items()}


def pytest_terminal_summary(terminalreporter, config):
    session = getattr(config, "_benchmarksession", None)
    if session is None or not session.benchmarks:
        return
    terminalreporter.section("ratios (min / median)")
    for bench in session.benchmarks:
        terminalreporter.write_line(bench.name)
        for name, value in bench.extra_info.items():
            if isinstance(value, dict):
                value = f"{value['min']:>8} / {value['median']}"
            terminalreporter.write_line(f"    {name:36} {value}")
