"""What a split by cost gives a model with a large vocabulary: step time and bubble by split.

``pp2`` trains the model itself on two ranks: blocks split by count, by the modelled costs, and by
times that the ranks measured. ``pp4`` may have more ranks than there are cores, so its stages sleep
for what the model's parts cost, run by the trainer's own pipeline (see ``bench_schedules``). All
splits of a case take turns in one set of ranks; the slowest rank's time counts. Beside each ratio
stands the one that the plan's simulation predicts with the same costs.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from bench_schedules import HIDDEN, SEQ_LEN, SleepStage, rounded, wake_on_time

from mcp_parallel.config import Config
from mcp_parallel.division import listed, stage_layers
from mcp_parallel.launch.local import launch_local
from mcp_parallel.layout import Layout
from mcp_parallel.parallel.clock import Occupation, bubbles
from mcp_parallel.parallel.layer_times import measure_layers
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.parallel.parallelize import Stage
from mcp_parallel.parallel.pipeline import Pipeline, plan_of
from mcp_parallel.planner.balance import LayerCosts, modelled_costs, stage_factors
from mcp_parallel.schedules.simulate import Costs, simulate
from mcp_parallel.settle import choose
from mcp_parallel.step import TrainingStep

# A head as costly as five blocks: 8192 words over a hidden size of 128.
SHAPE = {
    "preset": None,
    "hidden_size": 128,
    "num_heads": 4,
    "num_kv_heads": 4,
    "ffn_size": 352,
    "vocab_size": 8192,
    "seq_len": 128,
}
MICROBATCHES = 8
BLOCK_S = 0.006  # of a sleeping block, forward and backward
REAL = ("1f1b", "zbv")
ASLEEP = ("1f1b", "interleaved")


def configure(pp, schedule, layers, split, virtual=1):
    parallel = {"pp": pp, "schedule": schedule, "virtual_stages": virtual, "stage_split": split}
    train = {"global_batch_size": 2 * MICROBATCHES, "micro_batch_size": 2}
    model = {**SHAPE, "num_layers": layers}
    return Config.from_mapping({"model": model, "parallel": parallel, "train": train})


def simulated(config, split, costs):
    """Makespan of the plan, its stages as costly as they are; in the mean stage's forwards."""
    plan = plan_of(config, Layout.from_config(config.parallel))
    return simulate(plan, Costs(stages=stage_factors(split, costs))).makespan


def in_turns(runs, rounds, world):
    """Seconds and mean bubble of each run by round; a run gives its occupation."""
    found = {name: {"seconds": [], "bubble": []} for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            dist.barrier()
            start = time.perf_counter()
            own = run()
            own = [time.perf_counter() - start, own.busy_s, own.wall_s]
            each = [torch.zeros(3, dtype=torch.float64) for _ in range(world)]
            dist.all_gather(each, torch.tensor(own, dtype=torch.float64))
            if turn > 0:  # the first connects the ranks and allocates
                idle = bubbles(
                    [Occupation(busy, wall) for _, busy, wall in map(torch.Tensor.tolist, each)]
                )
                found[name]["seconds"].append(max(row[0].item() for row in each))
                found[name]["bubble"].append(sum(idle) / world)
    return found


def real_runs(rank, schedule):
    """The trainer's step by name of the split, and each split's numbers and largest cost."""
    base = configure(2, schedule, 8, "count")
    layout = Layout.from_config(base.parallel)
    mesh = build_mesh(layout, torch.device("cpu"))
    assert mesh is not None
    own = measure_layers(base, mesh)
    times = [torch.zeros(3, dtype=torch.float64) for _ in range(2)]
    row = torch.tensor([own.embedding, own.block, own.head], dtype=torch.float64)
    dist.all_gather(times, row)
    costs = [
        LayerCosts(embedding=e, block=b, head=h) for e, b, h in map(torch.Tensor.tolist, times)
    ]
    wanted = replace(base, parallel=replace(base.parallel, stage_split="measured"))
    measured = choose(wanted, costs).stage_split
    assert measured is not None
    runs, facts = {}, {}
    for name, split in (("count", "count"), ("model", "model"), ("measured", listed(measured))):
        config = configure(2, schedule, 8, split)
        step = TrainingStep(config, mesh)
        tokens = torch.arange(len(step.rows()) * 128).view(-1, 128) % 8192

        def run(step=step, tokens=tokens):
            step(tokens, tokens, 1e-3)
            return step.executor.occupation

        runs[name] = run
        sizes = [len(layers) for layers in stage_layers(config)]
        facts[name] = {"split": listed(sizes), "simulated": simulated(config, sizes, costs[0])}
    return runs, facts


def sleeping_runs(rank, schedule):
    """Sleeping stages of four ranks, as ``real_runs``."""
    virtual = 2 if schedule == "interleaved" else 1
    runs, facts = {}, {}
    for name in ("count", "model"):
        config = configure(4, schedule, 16, name, virtual)
        layout = Layout.from_config(config.parallel)
        mesh = build_mesh(layout, torch.device("cpu"))
        assert mesh is not None
        modelled = modelled_costs(config)
        unit = BLOCK_S / modelled.block
        sizes, last = [len(layers) for layers in stage_layers(config)], layout.num_stages - 1
        stages = []
        for s in layout.stages_of(rank):
            ends = {"is_first": s == 0, "is_last": s == last}
            work_s = modelled.of_stage(sizes[s], **ends) * unit / 3
            stages.append(Stage(s, SleepStage(work_s, s == 0), [], **ends))  # pyright: ignore[reportArgumentType]
        small = replace(config.model, hidden_size=HIDDEN, vocab_size=HIDDEN, seq_len=SEQ_LEN)
        train = replace(config.train, global_batch_size=MICROBATCHES, micro_batch_size=1)
        pipeline = Pipeline(
            stages, replace(config, model=small, train=train), mesh, lambda out, targets: out.sum()
        )
        tokens = torch.zeros(MICROBATCHES, SEQ_LEN, dtype=torch.int64)

        def run(pipeline=pipeline, tokens=tokens):
            pipeline.run(tokens, tokens)
            return pipeline.occupation

        runs[name] = run
        facts[name] = {"split": listed(sizes), "simulated": simulated(config, sizes, modelled)}
    return runs, facts


def bench_stage_split(benchmark):
    """Each case's splits in turns; ratios of the split by count to the others."""
    rounds = 1 if benchmark.disabled else 9
    # A process of its own: ranks are forks, and this one has run other benches' threads.
    command = [sys.executable, "-W", "ignore", __file__, str(rounds)]
    done = benchmark.pedantic(
        lambda: subprocess.run(command, capture_output=True, text=True, timeout=500), rounds=1
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        benchmark.extra_info.update(json.loads(line))


def summary(found, facts):
    """Figures of a case's splits, and how many times faster than by count they are."""
    lines = {}
    for name, times in found.items():
        pick = {"min": min, "median": statistics.median}
        figures = {f"step_{key}_s": take(times["seconds"]) for key, take in pick.items()}
        figures |= {f"bubble_{key}": take(times["bubble"]) for key, take in pick.items()}
        if name != "count":
            for key, take in pick.items():
                figures[f"times_faster_{key}"] = take(found["count"]["seconds"]) / take(
                    times["seconds"]
                )
            figures["times_faster_predicted"] = (
                facts["count"]["simulated"] / facts[name]["simulated"]
            )
        lines[f"{name} {facts[name]['split']}"] = rounded(figures)
    return lines


def main(rounds):
    """Run all cases and print one JSON object a line each."""
    torch.set_num_threads(1)
    for world, schedules, make in ((2, REAL, real_runs), (4, ASLEEP, sleeping_runs)):

        def entry(context, world=world, schedules=schedules, make=make):
            if make is sleeping_runs:
                wake_on_time()
            for schedule in schedules:
                runs, facts = make(context.rank, schedule)
                found = in_turns(runs, rounds, world)
                if context.rank == 0:
                    line = {f"pp{world} {schedule}": summary(found, facts)}
                    sys.stdout.write(json.dumps(line) + "\n")
                    sys.stdout.flush()
            return 0

        status = launch_local(entry, world, preload=("mcp_parallel.step",))
        if status != 0:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 9))
