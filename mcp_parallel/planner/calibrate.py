"""Time this machine's CPU ranks for the planner, in a few seconds. Needs torch where it measures.

    samples = measure(2)                               two ranks at work at the same time
    hardware = calibrate(samples, cpu_hardware(2))     what ``plan --gpu here`` takes

All ranks work at once, as they do in training: they share memory, caches, and cores where there are
more ranks than those.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mcp_parallel.config import Config, ModelConfig
from mcp_parallel.launch.local import launch_local
from mcp_parallel.planner import calibration
from mcp_parallel.planner.calibration import MIDDLE, MIDDLE_ROWS, SMALL, SMALL_ROWS
from mcp_parallel.planner.hardware import Hardware
from mcp_parallel.planner.machine import cpu_hardware, machine_here

if TYPE_CHECKING:
    import torch

    from mcp_parallel.launch.context import RankContext
    from mcp_parallel.parallel.mesh import Mesh

_MATMULS = [(512, side, side) for side in (32, 64, 128, 256, 512)]
_MATMULS += [(64, 256, 256), (2048, 256, 256), (512, 1024, 256), (512, 256, 1024)]
_LARGE = (512, 512, 512)
_STREAM_ELEMENTS = 1 << 20
_ALL_REDUCES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)
_BUDGET_S = 0.06  # of each timing; a few seconds for all
_PRELOAD = ("mcp_parallel.step", "mcp_parallel.parallel.layer_times")


def calibrated(ranks: int, *, anew: bool = False) -> Hardware:
    """This machine with ``ranks`` CPU ranks; measured once, then read from a file in the cache.

    Args:
        ranks: that work at the same time.
        anew: measure whatever the cache holds.

    Raises:
        RuntimeError: a rank failed; its error is on stderr.

    Cost: about five seconds when it measures.
    """
    base = cpu_hardware(ranks)
    known = None if anew else calibration.cached(ranks, base)
    if known is not None:
        return known
    samples = measure(ranks)
    calibration.save(calibration.machine_facts(ranks), samples)
    return calibration.calibrate(samples, base)


def hardware_here(ranks: int, device: str = "auto") -> Hardware:
    """A rank of this machine when it runs ``ranks``: its GPU's data sheet, or its cores measured.

    Args:
        ranks: of the job, all of them here.
        device: auto, cpu or cuda, as ``MCP_DEVICE``.

    Raises:
        ConfigError: the GPUs are of a kind that the planner has no figures of.
        RuntimeError: a rank that measures failed; its error is on stderr.
    """
    machine = machine_here(ranks, device)
    return calibrated(ranks) if machine.is_cpu else machine.hardware


def measure(ranks: int) -> calibration.Samples:
    """Start ``ranks`` ranks here and time them.

    Raises:
        RuntimeError: a rank failed; its error is on stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "samples.json"

        def entry(context: RankContext) -> int:
            samples = _measure_on_rank(context)
            if context.rank == 0:
                file.write_text(json.dumps(asdict(samples)), encoding="ascii")
            return 0

        if launch_local(entry, ranks, preload=_PRELOAD) != 0:
            raise RuntimeError("calibrate: every rank must finish, got a failure (see stderr)")
        return calibration.Samples.from_mapping(json.loads(file.read_text(encoding="ascii")))


def _measure_on_rank(context: RankContext) -> calibration.Samples:
    import torch

    timer = _Timer(context.world_size)
    rates = {
        name: timer.best(_matmul(_LARGE, dtype))
        for name, dtype in (
            ("fp32", torch.float32),
            ("fp64", torch.float64),
            ("bf16", torch.bfloat16),
            ("fp16", torch.float16),
        )
    }
    matmuls = [(*shape, timer.best(_matmul(shape, torch.float32))) for shape in _MATMULS]
    small, overhead = _small_model(context, timer)
    return calibration.Samples(
        ranks=context.world_size,
        matmuls=matmuls,
        formats={name: rates["fp32"] / rates[name] for name in rates if name != "fp32"},
        stream=(12.0 * _STREAM_ELEMENTS, timer.best(_stream())),
        attention=_attention(timer),
        all_reduces=_all_reduces(timer) if context.world_size > 1 else [],
        gather_and_back_s=_gather_and_back(timer) if context.world_size > 1 else 0.0,
        small_block_s=small,
        middle_block_s=timer.mean(_layers(context, MIDDLE, MIDDLE_ROWS)[0]),
        step_overhead_s=overhead,
    )


class _Timer:
    """Times things on all ranks at once."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def best(self, run: Callable[[], object]) -> float:
        """Lower quartile of a call's seconds, mean over the ranks."""
        return self.mean(self.local(run))

    def local(self, run: Callable[[], object], calls: int | None = None) -> float:
        """Lower quartile on this rank, of ``calls`` or of as many as the budget allows."""
        import torch.distributed as dist

        run()
        if self.ranks > 1:
            dist.barrier()
        found: list[float] = []
        end = time.perf_counter() + _BUDGET_S
        while len(found) < (calls or 3) or (calls is None and time.perf_counter() < end):
            start = time.perf_counter()
            run()
            found.append(time.perf_counter() - start)
        return sorted(found)[len(found) // 4]

    def mean(self, seconds: float) -> float:
        """Over the ranks."""
        import torch
        import torch.distributed as dist

        total = torch.tensor([seconds], dtype=torch.float64)
        if self.ranks > 1:
            dist.all_reduce(total)
        return total.item() / self.ranks


def _matmul(shape: tuple[int, int, int], dtype: torch.dtype) -> Callable[[], object]:
    import torch

    m, n, k = shape
    x, weight = torch.ones(m, k, dtype=dtype), torch.ones(n, k, dtype=dtype)
    out = torch.empty(m, n, dtype=dtype)
    return lambda: torch.mm(x, weight.T, out=out)


def _stream() -> Callable[[], object]:
    import torch

    a, b, out = (torch.ones(_STREAM_ELEMENTS) for _ in range(3))
    return lambda: torch.add(a, b, out=out)


def _attention(timer: _Timer) -> tuple[float, float, int, float]:
    """Causal, one sequence of 256 and four heads of 64."""
    import torch

    from mcp_kernels import flash_attn_func

    length, heads, size = 256, 4, 64
    q, k, v = (torch.ones(1, length, heads, size, requires_grad=True) for _ in range(3))
    grad = torch.ones(1, length, heads, size)
    forward = timer.best(lambda: flash_attn_func(q, k, v, causal=True))
    out = flash_attn_func(q, k, v, causal=True)
    backward = timer.best(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    return forward, backward, length, 2.0 * length * length * heads * size


def _all_reduces(timer: _Timer) -> list[tuple[int, float]]:
    import torch
    import torch.distributed as dist

    found = []
    for num_bytes in _ALL_REDUCES:
        x = torch.zeros(num_bytes // 4)
        # As many on each rank: a rank that stopped early would leave the others waiting.
        seconds = timer.local(lambda x=x: dist.all_reduce(x), calls=15)
        found.append((num_bytes, timer.mean(seconds)))
    return found


def _gather_and_back(timer: _Timer) -> float:
    import torch

    from mcp_kernels import all_gather

    x, grad = torch.zeros(8, requires_grad=True), torch.zeros(8 * timer.ranks)

    def run() -> None:
        torch.autograd.grad(all_gather(x), x, grad)

    return timer.mean(timer.local(run, calls=30))


def _layers(context: RankContext, model: ModelConfig, rows: int) -> tuple[float, float]:
    """Seconds of a block, and of embedding, block and head together."""
    from mcp_parallel.parallel.layer_times import measure_layers

    config, mesh = _replicas(context, model, rows)
    costs = measure_layers(config, mesh, rounds=15)
    return costs.block, costs.embedding + costs.block + costs.head


def _small_model(context: RankContext, timer: _Timer) -> tuple[float, float]:
    """Seconds of its block, and of a step beyond its layers."""
    import torch

    from mcp_parallel.step import TrainingStep

    block, layers = _layers(context, SMALL, SMALL_ROWS)
    config, mesh = _replicas(context, SMALL, SMALL_ROWS)
    step = TrainingStep(config, mesh)
    tokens = torch.zeros(SMALL_ROWS, SMALL.seq_len, dtype=torch.int64)
    whole = timer.local(lambda: step(tokens, tokens, 1e-3), calls=20)
    return timer.mean(block), max(0.0, timer.mean(whole - layers))


def _replicas(context: RankContext, model: ModelConfig, rows: int) -> tuple[Config, Mesh]:
    """A run of which every rank is a replica with one micro-batch."""
    from mcp_parallel.layout import Layout
    from mcp_parallel.parallel.mesh import build_mesh

    base, ranks = Config(), context.world_size
    train = replace(
        base.train, global_batch_size=ranks * rows, micro_batch_size=rows, precision="fp32"
    )
    parallel = replace(base.parallel, dp=ranks)
    mesh = build_mesh(Layout.from_config(parallel), context.device)
    assert mesh is not None
    return replace(base, model=model, train=train, parallel=parallel), mesh
