"""What monitors cost: steps with nothing watched, with what is watched in each, and looked into.

    pytest bench/bench_monitors.py --benchmark-enable --benchmark-only [-k tiny]

Two ranks, a thread each, default configuration (TensorBoard and metrics.jsonl written by rank 0 of
every step). The three kinds of step take turns in one pair of ranks. A run's cost is that of each
step and, once in ``monitor.health_every`` steps, that of looking into one, over a step with nothing
watched: no clock of work, no look, no record. Of rank 0, which records: wall time and CPU time (all
threads of the process), by minimum and by median. What the monitor's own calls take of a step's CPU
time stands beside them: it is free of the noise between two steps, and leaves out what they drive
out of the caches.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bench_trainer import LAYOUTS, LR, SIZES, WORLD_SIZE, configure

from mcp_parallel.config import Config
from mcp_parallel.launch.context import RankContext
from mcp_parallel.launch.local import launch_local
from mcp_parallel.layout import Layout
from mcp_parallel.monitor.monitor import Monitor
from mcp_parallel.monitor.peak import peak_tflops
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.step import TrainingStep

ROUNDS = {"tiny": 100, "20m": 8}
EVERY = Config().monitor.health_every
# No step of the bench is due by its number but those that are meant to be.
NEVER, DUE, NOT_DUE = 1_000_000, 999_999, 0


class Steps:
    """The three kinds of step on one rank."""

    def __init__(self, context: RankContext, config: Config, folder: Path) -> None:
        mesh = build_mesh(Layout.from_config(config.parallel), context.device)
        assert mesh is not None
        config = replace(config, monitor=replace(config.monitor, health_every=NEVER))
        self.step = TrainingStep(config, mesh)
        rows = self.step.rows()
        shape = config.train.global_batch_size, config.model.seq_len + 1
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(config.model.vocab_size, shape, generator=generator)
        tokens = tokens[rows.start : rows.stop]
        self.batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        is_main = context.rank == 0
        self.monitor = Monitor(
            config,
            folder,
            start_step=0,
            is_main=is_main,
            peak_tflops=peak_tflops(config, context.device) if is_main else None,
        )
        self.num_recorded = 0
        self.calls_s = 0.0
        for owner, names in (
            (self.monitor, ["record"]),
            (self.step.probe, ["begin", "before", "after"]),
            (self.step.work, ["start", "own_s_by_rank", "communication_share"]),
        ):
            for name in names:
                setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, its CPU time added up."""

        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            result = call(*args, **kwargs)
            self.calls_s += time.thread_time() - start
            return result

        return run

    def bare(self) -> None:
        """Train, and nothing else."""
        self.step(*self.batch, LR)

    def watched(self, at: int = NOT_DUE) -> None:
        """As the trainer runs and records a step."""
        start = time.perf_counter()
        with self.step.work.running():
            self.step.work.start()
            result = self.step(*self.batch, LR, step=at)
            share = self.step.work.communication_share()
        assert (result.health is not None) == (at == DUE)
        self.monitor.record(
            self.num_recorded,
            result,
            LR,
            time.perf_counter() - start,
            communication_share=share,
        )
        self.num_recorded += 1

    def looked_into(self) -> None:
        """One of each ``monitor.health_every``."""
        self.watched(DUE)


KINDS = ("bare", "watched", "looked_into")
CLOCKS = ("wall", "cpu", "calls")


def time_steps(
    context: RankContext, config: Config, folder: Path, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each step by kind and clock; hooks on modules are not in ``calls``."""
    torch.set_num_threads(1)
    steps = Steps(context, config, folder)
    times = {kind: {clock: [] for clock in CLOCKS} for kind in KINDS}
    with contextlib.redirect_stdout(io.StringIO()), without_collections():
        for number in range(rounds + 1):
            gc.collect()
            for kind in KINDS if number % 2 else KINDS[::-1]:
                dist.barrier()
                before = time.perf_counter(), time.process_time(), steps.calls_s
                getattr(steps, kind)()
                after = time.perf_counter(), time.process_time(), steps.calls_s
                if number == 0:  # it makes buffers
                    continue
                for clock, start, end in zip(CLOCKS, before, after, strict=True):
                    times[kind][clock].append(end - start)
    return times


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Garbage is collected where the body asks for it alone."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
@pytest.mark.parametrize("size", SIZES)
def bench_monitors(benchmark, tmp_path: Path, size: str, layout: str):
    """Share of a run's time that monitors take with the default ``health_every``."""
    config = configure(SIZES[size], LAYOUTS[layout])
    rounds = 1 if benchmark.disabled else ROUNDS[size]
    report = tmp_path / "times.json"

    def rank(context: RankContext) -> int:
        times = time_steps(context, config, tmp_path / "run", rounds)
        if context.rank == 0:
            report.write_text(json.dumps(times))
        return 0

    status = benchmark.pedantic(launch_local, (rank, WORLD_SIZE), rounds=1, iterations=1)
    assert status == 0, "a rank failed; its error is above"
    times = json.loads(report.read_text())
    for how, of in (("min", min), ("median", statistics.median)):
        bare = {clock: of(times["bare"][clock]) for clock in CLOCKS}
        benchmark.extra_info.setdefault("step_ms", {})[how] = round(bare["wall"] * 1e3, 2)
        for clock in CLOCKS:
            watched, looked = (of(times[kind][clock]) for kind in KINDS[1:])
            step_s = bare["cpu" if clock == "calls" else clock]
            each, once = (watched - bare[clock]) / step_s, (looked - watched) / step_s
            figures = {
                f"{clock}: cost of each step, %": 100 * each,
                f"{clock}: cost of looking into one, %": 100 * once,
                f"{clock}: cost of a run (1 in {EVERY}), %": 100 * (each + once / EVERY),
            }
            for name, value in figures.items():
                benchmark.extra_info.setdefault(name, {})[how] = round(value, 2)
