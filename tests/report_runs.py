"""Run folders for the tests of the report: the files that a run leaves, written by hand."""

from __future__ import annotations

import json
import math
import random

from mcp_parallel.config import Config

LAYERS = ("embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm", "head")


def config_of(**parallel):
    values = {"model": {"preset": "tiny"}, "parallel": parallel, "train": {"steps": 60}}
    return Config.from_mapping(values)


def record(step, *, pp=1, ranks=4, seed=0, tokens=2048, every=10):
    """What a healthy run writes after ``step``: every field, sampled ones where they are due."""
    noise = random.Random(f"{seed} {step}")
    loss = 2.2 + 3.4 * math.exp(-step / 25) + noise.gauss(0, 0.05)
    step_time_s = 0.2 + 0.02 * noise.random()
    row = {
        "step": step,
        "loss": loss,
        "loss_z": noise.gauss(0, 1),
        "lr": 3e-3 * min(1, step / 6),
        "grad_norm": 0.5 + 6 * math.exp(-step / 8) + 0.1 * noise.random(),
        "grad_norm_clipped": min(1.0, 0.5 + 6 * math.exp(-step / 8)),
        "clipped_share": math.exp(-step / 30),
        "tokens": step * tokens,
        "tokens_per_s": tokens / step_time_s,
        "step_time_s": step_time_s,
        "mfu": 0.31 + 0.01 * noise.random(),
        "model_tflops_per_rank": 0.04,
        "communication_share": 0.08 + 0.02 * noise.random(),
        "compute_s_by_rank": [0.15 + 0.01 * noise.random() for _ in range(ranks)],
    }
    if pp > 1:
        row["bubble_by_rank"] = [0.2 + 0.05 * noise.random() for _ in range(pp)]
        row["bubble"] = sum(row["bubble_by_rank"]) / pp
    if step % every == 0:
        decay = math.exp(-step / 40)
        row |= {
            "update_ratio_by_layer": {
                name: (1 + i) * 3e-4 * decay for i, name in enumerate(LAYERS)
            },
            "grad_norm_by_layer": {name: 0.2 * (1 + i) * decay for i, name in enumerate(LAYERS)},
            "activation_variance_by_layer": {f"blocks.{i}": 0.4 * 1.3**i for i in range(4)},
            "dead_share_by_layer": {f"blocks.{i}": 0.01 * i for i in range(4)},
            "variance_growth": 2.2,
            "memory_bytes_by_rank": [(300 + 9 * i) * 2**20 for i in range(ranks)],
            "val_loss": loss + 0.1,
        }
    return row


def write_run(folder, *, rows, config=None, verdicts=(), torn=False):
    """A run folder; ``rows`` are written as a trainer does, or as they are where they are text."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        text = config if isinstance(config, str) else config.to_yaml()
        (folder / "config.yaml").write_text(text, encoding="utf-8")
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    text = "".join(f"{line}\n" for line in lines) + ('{"step": 99, "lo' if torn else "")
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    if verdicts:
        text = "".join(json.dumps(one) + "\n" for one in verdicts)
        (folder / "verdicts.jsonl").write_text(text, encoding="utf-8")
    return folder


SPIKE = {
    "step": 31,
    "kind": "loss_spike",
    "severity": "warning",
    "where": None,
    "host": None,
    "value": 9.1,
    "low": None,
    "high": 6.0,
    "text": "the loss jumped at step 31: z-score 9.1, at most 6 is healthy; a bad batch or too "
    "large an update; look at the samples of step 31, lower train.lr or clip",
    "cause": "a bad batch or too large an update",
    "advice": "look at the samples of step 31",
}
NOT_FINITE = {
    "step": 58,
    "kind": "not_finite",
    "severity": "error",
    "where": "blocks.2.mlp.w2",
    "host": None,
    "value": None,
    "low": None,
    "high": None,
    "text": "blocks.2.mlp.w2 made a NaN in the forward pass of step 58",
}


def two_runs(root):
    """A data and tensor parallel run, and a pipeline that got two verdicts and diverged."""
    first = write_run(
        root / "dp2tp2",
        rows=[record(step) for step in range(1, 61)],
        config=config_of(dp=2, tp=2),
    )
    rows = [record(step, pp=2, ranks=2, seed=1) for step in range(1, 59)]
    rows[30]["loss"] += 2
    rows[57] |= {"loss": None, "grad_norm": None}
    second = write_run(
        root / "pp2",
        rows=rows,
        config=config_of(pp=2, schedule="zbv"),
        verdicts=[SPIKE, NOT_FINITE],
    )
    return first, second
