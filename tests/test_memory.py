"""The estimate of a rank's memory beside what its allocator was asked for."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mcp_kernels.optim import OneBitAdam
from mcp_parallel.cli.check import summarize
from mcp_parallel.config import Config
from mcp_parallel.layout import Layout
from mcp_parallel.memory import ends, estimate, kept, onebit, weights
from mcp_parallel.memory.ledger import Ledger
from mcp_parallel.memory.track import AllocationTracker
from mcp_parallel.model import formats, packing
from mcp_parallel.optim import lower_tier
from mcp_parallel.parallel import head_loss
from mcp_parallel.schedules.build import SCHEDULES

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 0.05
SHAPE = {
    "preset": None,
    "num_layers": 4,
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 176,
    "vocab_size": 256,
    "seq_len": 128,
}
BASE = {
    "model": SHAPE,
    "train": {"global_batch_size": 8, "micro_batch_size": 2, "warmup_steps": 0},
}
SAMPLE_BYTES = 2 * 8 * 2 * 128
"""Of a micro-batch's inputs and targets."""
CASES = [
    ["memory.activation_checkpointing=selective", "memory.activation_compression=int8"],
    ["train.precision=bf16"],
    ["parallel.dp=2", "parallel.zero=3", "memory.activation_checkpointing=full"],
    ["parallel.tp=2"],
    ["parallel.pp=2", "parallel.schedule=zbv"],
    ["parallel.pp=2", "parallel.schedule=zbv", "train.global_batch_size=64"],
    ["parallel.dp=2", "parallel.pp=2", "parallel.zero=1", "parallel.stage_split=1,3"],
    ["parallel.cp=2", "parallel.cp_attention=ring"],
    ["parallel.dp=4", "parallel.zero=3", "parallel.dp_replicate=2"],
    ["parallel.dp=2", "parallel.zero=1", "train.optimizer=onebit_adam", "train.freeze_step=1"],
    ["parallel.pp=2", "parallel.schedule=zero_bubble", "memory.activation_checkpointing=full"],
]
# Others would not be legal without these, or it takes next to as much without them.
NEEDED = {
    *("parallel.pp", "parallel.schedule", "parallel.dp", "parallel.dp_replicate"),
    *("parallel.cp_attention", "train.freeze_step", "train.global_batch_size"),
}
# What a key saves is less than the tolerance where the other is given.
SMALL_BESIDE = {
    "parallel.zero": "train.optimizer=onebit_adam",
    "memory.activation_checkpointing": "parallel.schedule=zero_bubble",
}
IMAGES = {
    "model": {"preset": "vit-digits", "patch_size": 1},
    "train": {"global_batch_size": 16, "micro_batch_size": 4, "warmup_steps": 0},
}
IMAGE_CASES = [
    ["memory.activation_checkpointing=selective", "memory.activation_compression=int8"],
    ["train.precision=bf16"],
    ["train.precision=bf16", "memory.offload=true"],
    ["parallel.dp=2", "parallel.zero=3", "memory.activation_checkpointing=full"],
    ["parallel.tp=2"],
    ["parallel.pp=2", "parallel.schedule=zero_bubble"],
    ["parallel.cp=4"],
]
SCRIPT = """
import json, os, sys
os.environ["KINETO_LOG_LEVEL"] = "99"
from mcp_parallel.config import Config
from mcp_parallel.memory.measure import measure_peaks
# The third step is the first after 1-bit Adam's switch that holds nothing of the first stage.
peaks = [
    [measure_peaks(Config.from_mapping(base).with_overrides(c), steps=3) for c in cases]
    for base, cases in json.loads(sys.argv[1])
]
open(sys.argv[2], "w").write(json.dumps(peaks))
"""


def config_of(changes):
    return Config.from_mapping(BASE).with_overrides(changes)


def image_config(changes):
    return Config.from_mapping(IMAGES).with_overrides(changes)


ALL = [(config_of, CASES), (image_config, IMAGE_CASES)]
ONE_BY_ONE = [(kind, index) for kind, (_, cases) in enumerate(ALL) for index in range(len(cases))]


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    result = tmp_path_factory.mktemp("peaks") / "peaks"
    given = json.dumps([[BASE, CASES], [IMAGES, IMAGE_CASES]])
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, given, str(result)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return json.loads(result.read_text())


def predicted(config):
    """Of every rank, in rank order."""
    layout = Layout.from_config(config.parallel)
    return [
        estimate.estimate(config, layout.coordinate(rank).pp).peak_bytes
        for rank in range(layout.world_size)
    ]


@pytest.mark.parametrize(
    ("kind", "index"), ONE_BY_ONE, ids=[" ".join(ALL[kind][1][index]) for kind, index in ONE_BY_ONE]
)
def test_estimate_is_within_five_percent_of_the_tracked_peak(tracked, kind, index):
    make, cases = ALL[kind]
    for guess, truth in zip(predicted(make(cases[index])), tracked[kind][index], strict=True):
        assert abs(guess / truth - 1) <= TOLERANCE, (guess, truth)


def test_an_estimate_that_leaves_something_out_is_found(tracked):
    """What each case is about, left out of its prediction, puts it out of tolerance."""
    of_all = [
        (make, changes, truth)
        for (make, cases), peaks in zip(ALL, tracked, strict=True)
        for changes, truth in zip(cases, peaks, strict=True)
    ]
    for make, changes, truth in of_all:
        for left_out in range(len(changes)):
            key = changes[left_out].partition("=")[0]
            if key in NEEDED or SMALL_BESIDE.get(key) in changes:
                continue
            rest = [c for i, c in enumerate(changes) if i != left_out]
            guess = max(predicted(make(rest)))
            assert abs(guess / max(truth) - 1) > TOLERANCE, (changes, key)


@pytest.mark.slow
def test_every_layout_of_the_bench_is_within_five_percent():
    command = [sys.executable, "bench/memory_ladder.py", "--estimates", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1500)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) >= 12
    for row in rows:
        assert abs(row["predicted"] / row["tracked"] - 1) <= TOLERANCE, row


def test_constants_are_those_of_what_is_replayed():
    assert kept.SMALLEST == packing.SMALLEST
    assert kept.BLOCK_SIZE == formats.BLOCK_SIZE
    assert head_loss._CHUNK_BYTES["cpu"] == ends.CHUNK_BYTES
    assert head_loss._MIN_ROWS["cpu"] == ends.MIN_ROWS
    assert head_loss._SMALL_BYTES == ends.SMALL_BYTES
    assert weights.SMALLEST_FILE == lower_tier.SMALLEST_FILE
    block_size = inspect.signature(OneBitAdam).parameters["block_size"].default
    assert block_size == onebit.BLOCK_SIZE


def test_peak_and_its_parts_are_those_of_one_moment():
    ledger = Ledger()
    a = ledger.new(100, "a")
    b = ledger.new(50, "b")
    ledger.hold(a)
    ledger.drop(a, None)
    assert ledger.total == 150
    ledger.drop(a)
    ledger.pass_by(120, "c")
    assert (ledger.peak, ledger.at_peak) == (170, {"a": 0, "b": 50, "c": 120})
    ledger.drop(b)
    assert ledger.total == 0
    with pytest.raises(AssertionError):
        ledger.drop(b)


def test_tracker_sees_inside_of_operations_and_what_is_left():
    torch.ones(10)
    with AllocationTracker() as tracker:
        kept_tensor = torch.ones(1000)
        x = torch.ones(25_000)
        y = (x * 2 + 1).sum()
        del x
    # x, x * 2 and the sum of both at once; the products are freed inside of the expression.
    numbers = 16  # the constants and the sum
    assert 4_000 + 3 * 100_000 <= tracker.peak_bytes <= 4_000 + 3 * 100_000 + numbers
    assert 4_000 <= tracker.final_bytes <= 4_000 + numbers
    assert tracker.sizes_at_peak[:4] == [100_000] * 3 + [4_000]
    assert y == 75_000
    assert kept_tensor.numel() == 1000


def test_a_pipelines_memory_does_not_grow_with_its_microbatches(tracked):
    few, many = (tracked[0][i] for i, case in enumerate(CASES) if "zbv" in " ".join(case))
    for rank in range(2):  # 28 micro-batches more, of tokens alone: a message has 64 KiB
        assert 0 <= many[rank] - few[rank] <= 28 * SAMPLE_BYTES


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_many_microbatches_are_not_replayed_one_by_one(schedule):
    chunks = 2 if schedule == "interleaved" else 1
    pipeline = [f"parallel.{key}" for key in (f"schedule={schedule}", f"virtual_stages={chunks}")]
    for pp in (2, 4):
        counts = (3 * pp, 8 * pp, 2000 * pp) if schedule != "gpipe" else (3 * pp, 8 * pp)
        configs = [
            config_of([*pipeline, f"parallel.pp={pp}", f"train.global_batch_size={2 * count}"])
            for count in counts
        ]
        for rank in range(pp):
            first, *others = (estimate.estimate(config, rank).peak_bytes for config in configs)
            for peak, count in zip(others, counts[1:], strict=True):
                # GPipe keeps what each micro-batch saves until its backward.
                alone = (peak - first) / ((count - counts[0]) * SAMPLE_BYTES)
                assert alone > 10 if schedule == "gpipe" else alone == 1


def test_check_says_what_a_rank_needs():
    memory = summarize(config_of(["parallel.pp=2"]))["memory"]
    assert [rank["peak_bytes"] for rank in memory] == predicted(config_of(["parallel.pp=2"]))
    for rank in memory:
        assert sum(rank["parts"].values()) == rank["peak_bytes"]
    images = image_config(["parallel.pp=2"])
    assert [rank["peak_bytes"] for rank in summarize(images)["memory"]] == predicted(images)


def test_sharding_divides_what_it_says():
    def parts(zero):
        changes = ["parallel.dp=4", f"parallel.zero={zero}", "train.micro_batch_size=1"]
        return estimate.estimate(config_of(changes)).parts

    assert parts(1)["optimizer"] * 4 == pytest.approx(parts(0)["optimizer"], rel=1e-3)
    assert parts(2)["gradients"] < 0.5 * parts(1)["gradients"]
    assert parts(3)["parameters"] < 0.7 * parts(2)["parameters"]
