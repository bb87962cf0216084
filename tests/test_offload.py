"""Optimizer state one tier down: the same bits, less anonymous memory, no file left."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcp_parallel.config import Config
from mcp_parallel.data.batch import BatchSource
from mcp_parallel.data.corpus import open_corpus
from mcp_parallel.layout import Layout
from mcp_parallel.optim.adamw import AdamW
from mcp_parallel.optim.lower_tier import SMALLEST_FILE, LowerTier, parts
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.parallel.shards import Shard
from mcp_parallel.snapshot import load_step, save_step
from mcp_parallel.step import TrainingStep

CPU = torch.device("cpu")
TRAIN = replace(Config().train, weight_decay=0.1)


class Far(LowerTier):
    """State that comes up for its update, as it does on a GPU, with nothing to pin it."""

    @property
    def is_far(self):
        return True

    def zeros_like(self, tensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype)


def make_shards(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (300, 200), "b": (7,), "c": (128, 512), "norm.weight": (40,)}
    values = {n: torch.nn.Parameter(torch.randn(s, generator=generator)) for n, s in shapes.items()}
    return [
        Shard(name, p, counted_here=True, grad_partial_over_tp=False) for name, p in values.items()
    ]


@pytest.mark.parametrize("kind", ["disk", "far"])
def test_updates_have_the_same_bits_on_every_tier(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("mcp_parallel.optim.adamw.parts", lambda t: parts(t, most_bytes=300_000))
    tier = LowerTier(CPU, tmp_path) if kind == "disk" else Far(CPU)
    here, there = make_shards(), make_shards()
    optimizers = AdamW(here, TRAIN), AdamW(there, TRAIN, tier)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for one, other in zip(here, there, strict=True):
            one.parameter.grad = torch.randn(one.parameter.shape, generator=generator)
            other.parameter.grad = one.parameter.grad.clone()
        if step == 2:  # a parameter may go without a gradient
            here[1].parameter.grad = there[1].parameter.grad = None
        for optimizer in optimizers:
            optimizer.step(1e-3, 0.5)
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.parameter, other.parameter)
    for (_, _, one), (_, _, other) in zip(*(o.moments() for o in optimizers), strict=True):
        assert torch.equal(one, other)
        assert one.any()


def test_parts_hold_every_tensor_once_and_no_more_than_they_may():
    tensors = [torch.empty(n) for n in (1, 100, 30, 30, 30, 500, 2)]
    found = list(parts(tensors, most_bytes=400))
    assert [index for part in found for index in part] == list(range(7))
    assert all(len(p) == 1 or sum(4 * tensors[i].numel() for i in p) <= 400 for p in found)
    assert len(found) == 5
    assert not list(parts([]))


def test_large_state_is_in_files_and_the_files_have_no_name(tmp_path):
    tier = LowerTier(CPU, tmp_path / "scratch")
    large = tier.zeros_like(torch.empty(SMALLEST_FILE // 4 + 3))
    assert not large.any()
    assert mapped_bytes(tmp_path) == pytest.approx(large.numel() * 4, abs=4096)
    assert list((tmp_path / "scratch").iterdir()) == []
    del large
    assert mapped_bytes(tmp_path) == 0
    tier.zeros_like(torch.empty(10))
    assert mapped_bytes(tmp_path) == 0


def mapped_bytes(folder):
    """Bytes that this process maps from files under ``folder``, deleted or not."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder) in line:
            low, high = (int(x, 16) for x in line.split()[0].split("-"))
            total += high - low
    return total


def test_a_full_disk_is_an_error_before_training(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        LowerTier(CPU, tmp_path).zeros_like(torch.empty(SMALLEST_FILE))


def config_of(offload, precision="fp32"):
    return Config.from_mapping(
        {
            "model": {
                "preset": None,
                "num_layers": 2,
                "hidden_size": 64,
                "num_heads": 4,
                "num_kv_heads": 2,
                "ffn_size": 300,
                "vocab_size": 256,
                "seq_len": 16,
            },
            "train": {
                "steps": 6,
                "global_batch_size": 2,
                "micro_batch_size": 2,
                "precision": precision,
            },
            "memory": {"offload": offload},
        }
    )


def train(step, first, last):
    config = step.config
    source = BatchSource(open_corpus(config.data, config.model), 0, 16, 2)
    losses = []
    for index in range(first, last):
        inputs, targets = source.batch(index, step.rows())
        losses.append(step(torch.from_numpy(inputs), torch.from_numpy(targets), 1e-3).loss)
    return losses


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_and_its_checkpoint_are_the_same_with_and_without(tmp_path, precision):
    mesh = build_mesh(Layout(), CPU)
    steps = {}
    for offload in (False, True):
        config = config_of(offload, precision)
        step = steps[offload] = TrainingStep(config, mesh, tmp_path / "scratch")
        losses = train(step, 0, 3)
        path = save_step(tmp_path / str(offload), 3, step)
        # Each checkpoint goes on in the other kind of run.
        other = TrainingStep(config_of(not offload, precision), mesh, tmp_path / "scratch")
        assert load_step(path, other) == 3
        steps[offload] = losses, train(step, 3, 6), train(other, 3, 6)
    assert steps[False] == steps[True]
    assert steps[True][1] == steps[True][2]
    assert not list((tmp_path / "scratch").iterdir())


def test_masters_of_16_bit_weights_are_below_too(tmp_path):
    """Each of what is large enough for a file is mapped once as a value and twice as moments."""
    step = TrainingStep(config_of(True, "bf16"), build_mesh(Layout(), CPU), tmp_path / "scratch")
    sizes = [4 * shard.parameter.numel() for shard in step.shards]
    large = sum(size for size in sizes if size >= SMALLEST_FILE)
    pages = 3 * len(sizes) * mmap.PAGESIZE
    assert 3 * large <= mapped_bytes(tmp_path / "scratch") <= 3 * large + pages
    for shard in step.shards:
        assert shard.master is not None
        assert torch.equal(shard.master.to(torch.bfloat16), shard.parameter.detach())


ANONYMOUS = """
import os, sys
from pathlib import Path
import torch
from mcp_parallel.optim.adamw import AdamW
from mcp_parallel.optim.lower_tier import LowerTier
from mcp_parallel.config import Config
from mcp_parallel.parallel.shards import Shard

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

def adam(numel, tier):
    parameter = torch.nn.Parameter(torch.ones(numel))
    parameter.grad = torch.ones(numel)
    made = AdamW([Shard("x", parameter, True, False)], Config().train, tier)
    made.step(1e-3)
    return made

disk = LowerTier(torch.device("cpu"), Path(sys.argv[1]))
adam(100, None)  # the first update imports much
for tier in (None, disk):
    before = anonymous()
    kept = adam(4_000_000, tier)
    print(anonymous() - before, flush=True)
    del kept
kept = adam(4_000_000, disk)
os.kill(os.getpid(), 9)
"""


def test_anonymous_memory_falls_by_the_moments_and_a_killed_process_leaves_no_file(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ANONYMOUS, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == -9, done.stderr
    in_memory, on_disk = map(int, done.stdout.split())
    one = 4 * 4_000_000  # a parameter and its gradient stay, two moments go
    assert in_memory > 3.9 * one
    assert on_disk < 2.1 * one
    assert list(tmp_path.iterdir()) == []
