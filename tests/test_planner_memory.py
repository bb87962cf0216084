"""The planner's closed form of memory beside the estimator, which replays every allocation."""

from __future__ import annotations

import dataclasses

import pytest

from mcp_parallel.config import Config
from mcp_parallel.memory import ends
from mcp_parallel.memory.estimate import estimate
from mcp_parallel.parallel import head_loss
from mcp_parallel.planner import memory
from mcp_parallel.planner.auto import with_layout
from mcp_parallel.planner.hardware import HARDWARE
from mcp_parallel.planner.layouts import Job, PlannedLayout
from mcp_parallel.planner.memory import peak_memory
from mcp_parallel.planner.runtime import OURS

# A closed form knows no order of events: what it may be off by. Each case's own subject is more, as
# the last test shows.
TOLERANCE = 0.08

# dp, tp, pp, cp, schedule, stages a rank, micro-batch, zero, checkpointing
CHUNK_OF_A_GPU = memory._LOGITS_CHUNK

LAYOUTS = {
    "plain": (1, 1, 1, 1, "1f1b", 1, 1, 0, "none"),
    "dp": (4, 1, 1, 1, "1f1b", 1, 2, 0, "none"),
    "selective": (4, 1, 1, 1, "1f1b", 1, 2, 1, "selective"),
    "full": (4, 1, 1, 1, "1f1b", 1, 2, 1, "full"),
    "zero 2": (4, 1, 1, 1, "1f1b", 1, 2, 2, "none"),
    "zero 3": (8, 1, 1, 1, "1f1b", 1, 1, 3, "selective"),
    "zero 3 full": (8, 1, 1, 1, "1f1b", 1, 1, 3, "full"),
    "tp": (1, 4, 1, 1, "1f1b", 1, 1, 0, "none"),
    "tp zero 1": (4, 4, 1, 1, "1f1b", 1, 1, 1, "full"),
    "cp": (2, 1, 1, 4, "1f1b", 1, 1, 1, "selective"),
    "1f1b": (1, 1, 4, 1, "1f1b", 1, 1, 0, "none"),
    "1f1b dp tp": (2, 2, 4, 1, "1f1b", 1, 1, 1, "selective"),
    "gpipe": (1, 1, 4, 1, "gpipe", 1, 1, 0, "full"),
    "interleaved": (2, 2, 4, 1, "interleaved", 2, 1, 1, "none"),
    "interleaved full": (2, 2, 4, 1, "interleaved", 4, 1, 1, "full"),
}


def job_of(config):
    return Job(
        model=config.model,
        ranks=1,
        hardware=HARDWARE["h100"],
        global_batch_size=config.train.global_batch_size,
        precision=config.train.precision,
    )


def replayed(config):
    return max(estimate(config, rank).peak_bytes for rank in range(config.parallel.pp))


def closed_form(config, layout, runtime=OURS):
    job = dataclasses.replace(job_of(config), runtime=runtime)
    found = peak_memory(job, layout)
    return found.total - found.reserve


def config_of(layout, precision):
    model = {"preset": "1.3b", "num_layers": 16, "tie_embeddings": False}
    train = {"global_batch_size": 16, "precision": precision}
    return with_layout(Config.from_mapping({"model": model, "train": train}), layout)


@pytest.fixture(autouse=True)
def _buffers_of_a_cpu(monkeypatch):
    """The estimator replays a CPU's loss, the planner's constant is of a GPU's."""
    monkeypatch.setattr(memory, "_LOGITS_CHUNK", ends.CHUNK_BYTES)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_closed_form_is_near_the_replay(name, precision):
    layout = PlannedLayout(*LAYOUTS[name])
    config = config_of(layout, precision)
    guess, truth = closed_form(config, layout), replayed(config)
    assert abs(guess / truth - 1) <= TOLERANCE, (guess / truth, guess, truth)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("selective", {"activation_checkpointing": "none"}),
        ("zero 3", {"activation_checkpointing": "none"}),
        ("full", {"activation_checkpointing": "selective"}),
        ("full", {"zero": 0}),
        ("zero 3 full", {"zero": 2}),
        ("1f1b", {"schedule": "gpipe"}),
        ("interleaved full", {"keeps_messages": True}),
    ],
)
def test_a_form_that_leaves_something_out_is_found(name, change):
    layout = PlannedLayout(*LAYOUTS[name])
    config = config_of(layout, "bf16")
    of_layout = {key: value for key, value in change.items() if key in PlannedLayout._fields}
    of_runtime = {key: value for key, value in change.items() if key not in of_layout}
    runtime = dataclasses.replace(OURS, **of_runtime)
    guess = closed_form(config, layout._replace(**of_layout), runtime)
    assert abs(guess / replayed(config) - 1) > TOLERANCE


def test_the_chunk_of_logits_is_that_of_the_loss():
    assert head_loss._CHUNK_BYTES["cuda"] == CHUNK_OF_A_GPU
