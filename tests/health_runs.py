"""Short runs of a small model for tests of monitors, with faults planted into them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from contexts import rank_context

from mcp_parallel.config import Config, ParallelConfig
from mcp_parallel.layout import Layout
from mcp_parallel.trainer import Trainer

SIZES = {
    "preset": None,
    "num_layers": 4,
    "hidden_size": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 42,
    "vocab_size": 256,
    "seq_len": 16,
}


def configure(layout: Layout = Layout(), **tables) -> Config:  # noqa: B008 (frozen)
    """A model of 4 blocks at ``layout``; ``train={...}`` and the like go on top."""
    base = {
        "model": SIZES | tables.pop("model", {}),
        "train": {"steps": 4, "global_batch_size": 8, "micro_batch_size": 1, "warmup_steps": 1}
        | tables.pop("train", {}),
        "checkpoint": {"every": 0} | tables.pop("checkpoint", {}),
        "monitor": {"tensorboard": False, "health_every": 2} | tables.pop("monitor", {}),
        **tables,
    }
    return replace(Config.from_mapping(base), parallel=ParallelConfig(**asdict(layout)))


def train(
    rank: int,
    world: int,
    config: Config,
    folder: Path,
    plant: Callable[[Trainer], None] | None = None,
) -> int:
    """A rank's run; ``plant`` is given its trainer before it begins."""
    context = rank_context(rank, world)
    trainer = Trainer(config, context, run_dir=folder)
    if plant is not None:
        plant(trainer)
    return trainer.fit()


def lines(folder: Path, name: str) -> list[dict]:
    """The records of ``metrics.jsonl`` or ``verdicts.jsonl``."""
    path = folder / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def verdicts(folder: Path) -> list[tuple[str, str | None]]:
    """(kind, where) of each verdict."""
    return [(row["kind"], row["where"]) for row in lines(folder, "verdicts.jsonl")]
