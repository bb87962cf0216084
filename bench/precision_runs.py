"""Train the tiny preset in fp32, bf16 and fp16 on the same data: where does the loss end?

    python bench/precision_runs.py [--steps 100] [--set key=value]

Real runs of the trainer in this process, one after the other, each with the preset's own schedule
over ``--steps``. Prints the mean loss of the last 20 steps, its difference from fp32, the steps
that fp16 skipped, and CPU time a step. "fp32 (lr)" is fp32 at a rate that differs in the seventh
digit: what it ends apart is what training makes of any rounding, the yardstick of the others. On a
CPU 16 bits are about numerics: where it has no 16-bit matrix units they are no faster.
"""

from __future__ import annotations

import argparse
import json
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
    deviation: float
    """Standard deviation of one step's loss among them."""
    skipped: int
    cpu_s: float
    """A step, mean over the run."""


def train(name: str, steps: int, overrides: Sequence[str]) -> Run:
    """One run from the same initial values on the same data."""
    keys = [f"train.steps={steps}", "checkpoint.every=0", "monitor.tensorboard=false"]
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
    skipped = sum(row.get("skipped", False) for row in rows)
    return Run(statistics.mean(last), statistics.stdev(last), skipped, cpu_s)


def main() -> None:
    """Run all three and print a line each."""
    parser = argparse.ArgumentParser(description="final loss in fp32, bf16 and fp16")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--set", action="append", default=[], metavar="key=value")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = {name: train(name, args.steps, args.set) for name in RUNS}
    exact = runs["fp32"]
    columns = (
        f"{'':9} {'loss':>8} {'from fp32':>10} {'':>8} {'skipped':>8} {'CPU ms':>7} {'ratio':>6}"
    )
    lines = [columns]
    for name, run in runs.items():
        difference = run.loss - exact.loss
        lines.append(
            f"{name:9} {run.loss:8.4f} {difference:+10.4f} {difference / exact.loss:+8.2%} "
            f"{run.skipped:8} {1e3 * run.cpu_s:7.1f} {run.cpu_s / exact.cpu_s:6.2f}"
        )
    lines.append(f"one step's loss varies by {exact.deviation:.4f} (standard deviation, fp32)")
    print("\n".join(lines))  # noqa: T201


if __name__ == "__main__":
    main()
