"""The bubble of every schedule, measured on ranks whose work is to sleep.

A stage sleeps in its forward, its input gradient and its weight gradient, and is run by the
trainer's own pipeline on the trainer's own ranks: what is idle beyond theory is what those cost.
Sleeping takes no CPU, so four ranks keep time on two cores. What would spoil it is a sleeper that
is woken late because another program has the core, for every rank behind it waits too: ranks ask
for real-time priority, and the figures say whether they got it. (At a load of 30 GPipe's median is
0.026 above theory without it and 0.008 with it.) Theory is the plan's simulation with the same
times, which for GPipe, 1F1B and interleaved is (p - 1) / (m v + p - 1).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcp_kernels.ops._deferred import deferring
from mcp_parallel.config import Config
from mcp_parallel.launch.local import launch_local
from mcp_parallel.layout import Layout
from mcp_parallel.parallel.clock import Occupation, bubbles
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.parallel.parallelize import Stage
from mcp_parallel.parallel.pipeline import Pipeline, plan_of
from mcp_parallel.schedules.simulate import Costs, simulate

PP = 4
# Of a rank's whole part of a micro-batch, as forward 20 ms and backward 40 ms.
WORK_S = 0.02
HIDDEN, SEQ_LEN = 4, 2

CASES = [  # schedule, micro-batches, virtual stages
    ("gpipe", 8, 1),
    ("1f1b", 4, 1),
    ("1f1b", 8, 1),
    ("1f1b", 16, 1),
    ("interleaved", 8, 2),
    ("zero_bubble", 8, 1),
    ("zero_bubble", 8, 2),
    ("zbv", 8, 1),
    ("dualpipev", 8, 1),
]


class _Sleep(torch.autograd.Function):
    """The value unchanged; sleeps so long in forward and so long in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grads[0].contiguous(), None, None  # the loss sends an expanded one


class _SleepWeight(torch.autograd.Function):
    """Adds nothing to x; the gradient of the weight takes so long, now or when it is asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, backward_s: float) -> Tensor:
        ctx.weight, ctx.backward_s = weight, backward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        later, weight = deferring(), ctx.weight

        def compute() -> list[Tensor]:
            time.sleep(ctx.backward_s)
            return [torch.zeros_like(weight)]

        if later is None:
            return grads[0], compute()[0], None
        later.add([weight], compute)
        return grads[0], None, None


class SleepStage(nn.Module):
    """Takes ``work_s`` for a forward, an input gradient and a weight gradient each."""

    leaves_head = False  # what it gives is the output that the loss is of

    def __init__(self, work_s: float, is_first: bool) -> None:
        super().__init__()
        self.work_s, self.is_first = work_s, is_first
        self.weight = nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = torch.zeros(*x.shape, HIDDEN, requires_grad=True)
        x = _Sleep.apply(x, self.work_s, self.work_s)  # pyright: ignore[reportAssignmentType]
        return _SleepWeight.apply(x, self.weight, self.work_s)  # pyright: ignore[reportReturnType]


def configure(schedule, microbatches, virtual_stages):
    base = Config()
    model = replace(base.model, hidden_size=HIDDEN, vocab_size=HIDDEN, seq_len=SEQ_LEN)
    parallel = replace(base.parallel, pp=PP, schedule=schedule, virtual_stages=virtual_stages)
    train = replace(base.train, global_batch_size=microbatches, micro_batch_size=1)
    return replace(base, model=model, parallel=parallel, train=train)


def measure(rank, world, cases, rounds):
    """Bubbles by case and round: mean over ranks, as the trainer's own metric has it."""
    pipelines = []
    for case in cases:
        config = configure(*case)
        layout = Layout.from_config(config.parallel)
        mesh = build_mesh(layout, torch.device("cpu"))
        assert mesh is not None
        last = layout.num_stages - 1
        stages = [
            Stage(s, SleepStage(WORK_S / layout.stages_per_rank, s == 0), [], s == 0, s == last)  # pyright: ignore[reportArgumentType]
            for s in layout.stages_of(rank)
        ]
        pipelines.append(Pipeline(stages, config, mesh, lambda logits, targets: logits.sum()))
    found = [[] for _ in cases]
    for turn in range(rounds + 1):
        for case, pipeline, means in zip(cases, pipelines, found, strict=True):
            tokens = torch.zeros(case[1], SEQ_LEN, dtype=torch.int64)
            dist.barrier()
            pipeline.run(tokens, tokens)
            own = pipeline.occupation
            times = [torch.zeros(2, dtype=torch.float64) for _ in range(world)]
            dist.all_gather(times, torch.tensor([own.busy_s, own.wall_s], dtype=torch.float64))
            if turn > 0:  # the first connects the ranks
                each = bubbles([Occupation(*pair.tolist()) for pair in times])
                means.append(sum(each) / world)
    return found


def theory(case):
    config = configure(*case)
    plan = plan_of(config, Layout.from_config(config.parallel))
    timeline = simulate(plan, Costs())
    return sum(timeline.bubble(rank) for rank in range(PP)) / PP


def rounded(figures):
    return {name: round(value, 4) for name, value in figures.items()}


def bench_bubbles(benchmark):
    """All cases in turns, so that load meets all alike; also each over 1F1B's of the same size."""
    rounds = 1 if benchmark.disabled else 7
    # A process of its own: ranks are forks, and this one has run other benches' threads.
    command = [sys.executable, "-W", "ignore", __file__, json.dumps(CASES), str(rounds)]
    done = benchmark.pedantic(
        lambda: subprocess.run(command, capture_output=True, text=True, timeout=300), rounds=1
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    benchmark.extra_info["real-time priority"] = result["real-time"]
    bubbles_of = dict(zip(CASES, result["bubbles"], strict=True))
    figures = {
        case: {"min": min(values), "median": statistics.median(values)}
        for case, values in bubbles_of.items()
    }
    for case, found in figures.items():
        expected = theory(case)
        # Sleeping is exact or late, never early, and lateness counts as work: a measurement far
        # below theory would be a wrong one.
        assert found["min"] > 0.9 * expected, (case, found, expected)
        name = f"{case[0]} m{case[1]} v{case[2]}"
        info = benchmark.extra_info
        info[name] = rounded(found)
        info[f"{name} less {expected:.4f}"] = rounded({k: v - expected for k, v in found.items()})
        peer = figures["1f1b", case[1], 1]
        if case[0] not in ("gpipe", "1f1b"):
            info[f"{name} over 1f1b"] = rounded({k: found[k] / peer[k] for k in found})


def wake_on_time():
    """Ask for real-time priority, which root has for the asking; returns whether it was given."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except (AttributeError, PermissionError):
        return False
    return True


def main(cases, rounds):
    """Measure on the trainer's ranks and print the bubbles by case and round."""
    torch.set_num_threads(1)

    def entry(context):
        is_on_time = wake_on_time()
        found = measure(context.rank, PP, cases, rounds)
        if context.rank == 0:
            sys.stdout.write(json.dumps({"real-time": is_on_time, "bubbles": found}) + "\n")
        return 0

    return launch_local(entry, PP)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), int(sys.argv[2])))
