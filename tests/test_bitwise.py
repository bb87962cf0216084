"""What must not change a single bit: running again, going on from a checkpoint, checkpointing."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from configs import config_of

from mcp_parallel.data.source import open_data, source_of
from mcp_parallel.layout import Layout
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.snapshot import load_step, save_step
from mcp_parallel.step import TrainingStep

STEPS, SAVED_AFTER = 3, 2
MODEL = {
    "preset": None,
    "num_layers": 4,
    "hidden_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 24,
    "vocab_size": 256,
    "seq_len": 16,
}
LAYOUTS = {
    "zero3 pp2 zbv": {"dp": 2, "zero": 3, "pp": 2, "schedule": "zbv"},
    "hsdp2x2 zero2": {"dp": 4, "zero": 2, "dp_replicate": 2},
    "tp2pp2": {"tp": 2, "pp": 2},
    "cp2 zero1": {"cp": 2, "zero": 1, "dp": 2},
}


def configure(parallel, checkpointing="none"):
    return config_of(
        **{f"model__{key}": value for key, value in MODEL.items()},
        **{f"parallel__{key}": value for key, value in parallel.items()},
        train__global_batch_size=8,
        train__micro_batch_size=2,
        train__clip_norm=0.05,
        memory__activation_checkpointing=checkpointing,
    )


def train(step, steps):
    """(loss, norm) of each step, and what this rank holds after the last."""
    source = source_of(open_data(step.config), step.config)
    figures = []
    for index in steps:
        inputs, targets = source.batch(index, step.rows())
        result = step(torch.from_numpy(inputs), torch.from_numpy(targets), 1e-2, step=index)
        figures.append((result.loss, result.grad_norm))
    return figures, [shard.local.clone().numpy() for shard in step.shards]


def run_in_every_way(rank, world, parallel, folder):
    warnings.simplefilter("ignore")
    config, compact = configure(parallel), configure(parallel, "full")
    mesh = build_mesh(Layout.from_config(config.parallel), torch.device("cpu"))
    assert mesh is not None
    first = TrainingStep(config, mesh)
    before, _ = train(first, range(SAVED_AFTER))
    path = save_step(Path(folder), SAVED_AFTER, first)
    whole, held = train(first, range(SAVED_AFTER, STEPS))  # saving changed nothing
    second = TrainingStep(config, mesh)
    assert load_step(path, second) == SAVED_AFTER
    after, held_after = train(second, range(SAVED_AFTER, STEPS))
    return {
        "whole": (before + whole, held),
        "resumed": (before + after, held_after),
        "again": train(TrainingStep(config, mesh), range(STEPS)),
        "checkpointing": train(TrainingStep(compact, mesh), range(STEPS)),
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_bit_changes(ranks, tmp_path, name):
    for ways in ranks.run(run_in_every_way, LAYOUTS[name], str(tmp_path), ranks=4):
        figures, held = ways.pop("whole")
        assert len(set(figures)) == STEPS  # it trains: no step is like another
        for way, (other_figures, other_held) in ways.items():
            assert other_figures == figures, way
            pairs = zip(other_held, held, strict=True)
            assert all((a == b).all() for a, b in pairs), way
