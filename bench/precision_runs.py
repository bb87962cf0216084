"""Train the tiny preset in fp32, bf16 and fp16 on the same data: where does the loss end?

    python bench/precision_runs.py [--steps 100] [--seeds 5] [--set key=value]

Real runs of the trainer in this process, one after the other, each with the preset's own schedule
over ``--steps``; for each seed (of the weights and of the data's order) all precisions in turn.
Prints the loss, the mean of the last 20 steps, as mean over the seeds; its gap to fp32, seed by
seed on the same weights and data, as mean with its standard error and its spread (standard
deviation over seeds); the steps that fp16 skipped; and CPU time a step as the median ratio to
fp32. "fp32 (lr)" is fp32 at a rate that differs in the seventh digit: what it ends apart is what
training makes of any rounding, the yardstick of the others. The last line sets the gaps beside what
another seed makes of fp32. On a CPU 16 bits are about numerics: where it has no 16-bit matrix units
they are no faster.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import torch

from mcp_parallel.config import Config
from mcp_parallel.trainer import Trainer

LAST = 20
RUNS = {
    "fp32": [],
    "fp32 (lr)": ["train.lr=0.003000001"],
    "bf16": ["amp.enabled=true", "amp.dtype=bf16"],
    "fp16": ["amp.enabled=true", "amp.dtype=fp16"],
}


@dataclass(frozen=True)
class Run:
    """What one precision came to."""

    loss: float
    """Mean of the last ``LAST`` steps, nats a token."""
    skipped: int
    cpu_s: float
    """A step, mean over the run."""


def train(name: str, seed: int, steps: int, overrides: Sequence[str]) -> Run:
    """One run from the initial values and on the data that ``seed`` gives."""
    keys = [f"train.steps={steps}", "checkpoint.every=0", "monitor.tensorboard=false"]
    keys += [f"train.seed={seed}", f"data.seed={seed}"]
    config = Config().with_overrides([*keys, *overrides, *RUNS[name]])
    with tempfile.TemporaryDirectory() as folder:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # its progress
            trainer = Trainer(config, run_dir=folder)
            start_s = time.process_time()
            status = trainer.fit()
        cpu_s = (time.process_time() - start_s) / steps
        if status:
            raise RuntimeError(f"precision_runs: {name} must end with status 0, got {status}")
        lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    last = [row["loss"] for row in rows[-LAST:]]
    return Run(statistics.mean(last), sum(row.get("skipped", False) for row in rows), cpu_s)


def spread(values: Sequence[float]) -> float:
    """Standard deviation of one of ``values``; NaN of a single one."""
    return statistics.stdev(values) if len(values) > 1 else math.nan


def table(runs: dict[str, list[Run]]) -> list[str]:
    """A line each precision; ``runs`` has them in the order of the seeds."""
    exact = runs["fp32"]
    titles = f"{'':9} {'loss':>8} {'gap':>9} {'std error':>10} {'spread':>8} {'of loss':>8} "
    lines = [titles + f"{'skipped':>8} {'CPU ratio':>10}"]
    for name, mine in runs.items():
        gaps = [run.loss - other.loss for run, other in zip(mine, exact, strict=True)]
        loss, gap = statistics.mean(run.loss for run in mine), statistics.mean(gaps)
        ratios = [run.cpu_s / other.cpu_s for run, other in zip(mine, exact, strict=True)]
        lines.append(
            f"{name:9} {loss:8.4f} {gap:+9.4f} {spread(gaps) / math.sqrt(len(gaps)):10.4f} "
            f"{spread(gaps):8.4f} {gap / loss:+8.2%} {sum(run.skipped for run in mine):8} "
            f"{statistics.median(ratios):10.2f}"
        )
    scatter = spread([run.loss for run in exact])
    lines.append(f"another seed moves fp32's loss by {scatter:.4f} (standard deviation)")
    return lines


def main() -> None:
    """Run every precision for every seed and print a line each."""
    parser = argparse.ArgumentParser(description="final loss in fp32, bf16 and fp16")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds 0 to N - 1")
    parser.add_argument("--set", action="append", default=[], metavar="key=value")
    args = parser.parse_args()
    if args.seeds < 1 or args.steps < LAST:
        parser.error(f"--seeds must be at least 1 and --steps at least {LAST}")
    torch.set_num_threads(1)
    runs: dict[str, list[Run]] = {name: [] for name in RUNS}
    for seed in range(args.seeds):
        for name in RUNS:
            runs[name].append(train(name, seed, args.steps, args.set))
    print("\n".join(table(runs)))  # noqa: T201


if __name__ == "__main__":
    main()
