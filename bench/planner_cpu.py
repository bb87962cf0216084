"""The planner's predictions beside steps on this machine's CPU ranks.

    python bench/planner_cpu.py            two ranks, then four; two models; --json for programs

First the machine is calibrated (``mcp_parallel.planner.calibrate``: products, streams, all-reduces
and single blocks, no layout among them), then each layout's step is predicted, and then all layouts
of one number of ranks are run in turns in one set of ranks, so that a busy moment hits all. Ratios
are predicted over measured; ranks are places in order of time. With more ranks than cores a step's
time depends on who waits how, which the planner knows nothing of: those rows stand apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from mcp_parallel.config import Config
from mcp_parallel.launch.cores import usable_cores
from mcp_parallel.launch.local import launch_local
from mcp_parallel.layout import Layout
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.planner.calibrate import calibrated
from mcp_parallel.planner.cost import CostModel
from mcp_parallel.planner.layouts import Job, PlannedLayout
from mcp_parallel.step import TrainingStep

SIZES = {
    # layers, hidden, heads, kv heads, ffn, vocabulary, sequence; global batch, micro-batch
    "tiny": ((4, 128, 8, 4, 352, 256, 128), 16, 4),
    "20m": ((8, 384, 6, 6, 1024, 8192, 256), 8, 2),
}
ROUNDS = {"tiny": 9, "20m": 3}  # about as long for both
LAYOUTS = {
    "one": {},
    "dp2": {"dp": 2},
    "dp2 zero1": {"dp": 2, "zero": 1},
    "dp2 zero3": {"dp": 2, "zero": 3},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "pp2 zbv": {"pp": 2, "schedule": "zbv"},
    "cp2": {"cp": 2},
    "dp4": {"dp": 4},
    "dp2tp2": {"dp": 2, "tp": 2},
    "dp2pp2": {"dp": 2, "pp": 2},
    "tp2pp2": {"tp": 2, "pp": 2},
}
KEYS = ("layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_size", "vocab_size", "seq_len")


def configure(size, degrees):
    """A run of a size at a layout; the micro-batch is halved where dp takes samples from it."""
    numbers, batch, micro = SIZES[size]
    shape = dict(zip(KEYS, numbers, strict=True))
    model = {"preset": None, "num_layers": shape.pop("layers"), **shape}
    micro = min(micro, batch // degrees.get("dp", 1))
    if degrees.get("pp", 1) > 1:
        micro = min(micro, batch // degrees.get("dp", 1) // 4)
    train = {"global_batch_size": batch, "micro_batch_size": max(1, micro)}
    return Config.from_mapping({"model": model, "parallel": degrees, "train": train})


def predicted(config, hardware):
    """Seconds of a step as the planner has it."""
    parallel, train = config.parallel, config.train
    layout = PlannedLayout(
        dp=parallel.dp,
        tp=parallel.tp,
        pp=parallel.pp,
        cp=parallel.cp,
        schedule=parallel.schedule,
        virtual_stages=parallel.virtual_stages,
        micro_batch_size=train.micro_batch_size,
        zero=parallel.zero,
        activation_checkpointing="none",
        rank_order=parallel.rank_order,
    )
    job = Job(
        model=config.model,
        ranks=Layout.from_config(parallel).world_size,
        hardware=hardware,
        global_batch_size=train.global_batch_size,
        precision=train.precision,
    )
    return CostModel(job).step(layout).step_s


def measure(configs, rounds, context):
    """Seconds of each layout's steps, by round; the slowest rank's."""
    steps = []
    for config in configs.values():
        mesh = build_mesh(Layout.from_config(config.parallel), context.device)
        steps.append(None if mesh is None else TrainingStep(config, mesh))
    times = {name: [] for name in configs}
    order = list(zip(configs, steps, strict=True))
    for turn in range(rounds + 1):
        for name, step in order:
            dist.barrier()
            start = time.perf_counter()
            if step is not None:
                rows, seq_len = len(step.rows()), step.config.model.seq_len
                tokens = torch.arange(rows * seq_len).view(rows, seq_len)
                step(tokens % step.config.model.vocab_size, tokens % 251, 1e-3)
            own = torch.tensor(time.perf_counter() - start if step is not None else 0.0)
            dist.all_reduce(own, op=dist.ReduceOp.MAX)
            if turn > 0:
                times[name].append(own.item())
        order.reverse()
    return times


def run_ranks(ranks, size, rounds):
    """Steps of all layouts of so many ranks (and of one rank, with two)."""
    names = [n for n, d in LAYOUTS.items() if _world(d) == ranks or (ranks == 2 and not d)]
    configs = {name: configure(size, LAYOUTS[name]) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"

        def entry(context):
            found = measure(configs, rounds, context)
            if context.rank == 0:
                file.write_text(json.dumps(found))
            return 0

        if launch_local(entry, ranks, preload=("mcp_parallel.step",)) != 0:
            raise RuntimeError("planner_cpu: a rank failed, see above")
        return configs, json.loads(file.read_text())


def _world(degrees):
    world = 1
    for axis in ("dp", "tp", "pp", "cp"):
        world *= degrees.get(axis, 1)
    return world


def places(values):
    """Place of each value in rising order, from 1."""
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(index) + 1 for index in range(len(values))]


def spearman(a, b):
    """Rank correlation; without ties."""
    n = len(a)
    squares = sum((x - y) ** 2 for x, y in zip(places(a), places(b), strict=True))
    return 1 - 6 * squares / (n * (n * n - 1))


def compare(ranks, size, rounds, hardware):
    """Rows of one number of ranks and one model, and what they come to."""
    configs, times = run_ranks(ranks, size, rounds)
    rows = []
    for name, config in configs.items():
        guess, each = predicted(config, hardware), times[name]
        rows.append(
            {
                "layout": name,
                "predicted_ms": guess * 1e3,
                "min_ms": min(each) * 1e3,
                "median_ms": statistics.median(each) * 1e3,
                "ratio_min": guess / min(each),
                "ratio_median": guess / statistics.median(each),
            }
        )
    guesses, truths = ([row[key] for row in rows] for key in ("predicted_ms", "median_ms"))
    for row, guess, truth in zip(rows, places(guesses), places(truths), strict=True):
        row["place_predicted"], row["place_measured"] = guess, truth
    errors = sorted(abs(row["ratio_median"] - 1) for row in rows)
    # What choosing by the prediction costs over choosing by the measurement.
    regret = truths[guesses.index(min(guesses))] / min(truths) - 1
    return {
        "ranks": ranks,
        "model": size,
        "rows": rows,
        "median_error": statistics.median(errors),
        "largest_error": errors[-1],
        "rank_correlation": spearman(guesses, truths) if len(rows) > 1 else 1.0,
        "regret": regret,
    }


def table(result):
    """One comparison as lines of text."""
    more = " (more ranks than cores)" if result["ranks"] > usable_cores() else ""
    lines = [
        f"{result['model']}, {result['ranks']} ranks{more}",
        _row("layout", "predicted", "min", "median ms", "p/min", "p/median", "place p", "measured"),
    ]
    for row in result["rows"]:
        times = [f"{row[key]:.1f}" for key in ("predicted_ms", "min_ms", "median_ms")]
        ratios = [f"{row[key]:.2f}" for key in ("ratio_min", "ratio_median")]
        found = [str(row[key]) for key in ("place_predicted", "place_measured")]
        lines.append(_row(row["layout"], *times, *ratios, *found))
    lines.append(
        f"median error {result['median_error']:.0%}, largest {result['largest_error']:.0%}, rank "
        f"correlation {result['rank_correlation']:.2f}, the predicted best is "
        f"{result['regret']:.0%} slower than the measured best"
    )
    return "\n".join(lines) + "\n"


def _row(name, *cells):
    return f"{name:12}" + "".join(f"{cell:>11}" for cell in cells)


def main():
    """Calibrate, predict, measure, print."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=[2, 4])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rounds", type=int, help="of each model")
    parser.add_argument("--cached", action="store_true", help="take an earlier calibration")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = []
    for ranks in args.ranks:
        hardware = calibrated(ranks, anew=not args.cached)
        if not args.json:
            sys.stdout.write(f"{describe(hardware)}\n\n")
        for size in args.sizes:
            results.append(compare(ranks, size, args.rounds or ROUNDS[size], hardware))
            if not args.json:
                sys.stdout.write(table(results[-1]) + "\n")
                sys.stdout.flush()
    if args.json:
        sys.stdout.write(json.dumps(results) + "\n")


def describe(hw):
    """The fitted figures in a line."""
    return (
        f"{hw.name}: fp32 peak {hw.peak('fp32') / 1e9:.0f} GFLOP/s a rank (half at side "
        f"{hw.half_efficiency_side:.0f}; {hw.matmul_efficiency:.0%} of it within a block), memory "
        f"{hw.memory_bytes_per_s / 1e9:.1f} GB/s, link {hw.domain_bytes_per_s / 1e9:.2f} GB/s + "
        f"{hw.domain_latency_s * 1e6:.0f} us, {hw.op_overhead_s * 1e6:.0f} us an operation, "
        f"{hw.step_overhead_s * 1e3:.1f} ms a step"
    )


if __name__ == "__main__":
    main()
