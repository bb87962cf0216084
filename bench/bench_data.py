"""Data: batches out of a 10 GB token file beside torch's DataLoader, and what training waits.

The file is sparse: it has an index and checksums like any other and takes no room on the disk, and
its 5 billion tokens are cut into samples that are read in an order that jumps through all of it.
DataLoader reads the same mapped file in its own random order, in this process and by a worker; it
compares no checksums.

A run's waiting is what its records say (``data_wait_share``), first steps included.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import Peer
from torch.utils.data import DataLoader, Dataset

from mcp_parallel.config import Config, DataConfig
from mcp_parallel.data.ahead import Ahead
from mcp_parallel.data.corpus import Corpus
from mcp_parallel.data.prepare.index import Index, Part, block_bytes_for, digest
from mcp_parallel.data.source import open_data, source_of
from mcp_parallel.trainer import Trainer

NUM_BYTES = 10 * 10**9
SEQ_LEN, BATCH = 2048, 16
STEPS = 40
# Part of the step time that training may wait for data.
LIMIT = 0.01


@pytest.fixture(scope="session")
def large(tmp_path_factory):
    """The folder of a token file of 10 GB of zeros, none of which is on the disk."""
    folder = tmp_path_factory.mktemp("large")
    path = folder / "tokens.bin"
    with path.open("wb") as file:
        file.truncate(NUM_BYTES)
    size = block_bytes_for(NUM_BYTES)
    whole, rest = divmod(NUM_BYTES, size)
    checksums = [digest(bytes(size))] * whole + [digest(bytes(rest))] * (rest > 0)
    part = Part("zeros", NUM_BYTES // 2, 1)
    index = Index(256, 2, 255, (part,), size, tuple(checksums))
    (folder / "index.json").write_bytes(index.to_bytes())
    yield folder
    assert path.stat().st_blocks * 512 < 10**6, "the file must stay sparse"
    os.unlink(path)


def configure(folder, **data):
    base = Config()
    return replace(
        base,
        model=replace(base.model, seq_len=SEQ_LEN),
        data=DataConfig(path=str(folder / "tokens.bin"), **data),
        train=replace(base.train, global_batch_size=BATCH, steps=10**6),
    )


class Windows(Dataset):
    """The same samples as a map-style dataset over the same file."""

    def __init__(self, path):
        self.tokens = np.memmap(path, dtype="<u2", mode="r")

    def __len__(self):
        return (len(self.tokens) - 1) // SEQ_LEN

    def __getitem__(self, index):
        start = index * SEQ_LEN
        window = torch.from_numpy(self.tokens[start : start + SEQ_LEN + 1].astype(np.int64))
        return window[:-1], window[1:]


class RandomOrder(torch.utils.data.Sampler):
    """Random samples without a permutation of all of them in memory, for DataLoader's best."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        while True:
            yield from torch.randint(self.count, (1 << 16,), generator=generator).tolist()


def batches_of_dataloader(folder, workers):
    windows = Windows(folder / "tokens.bin")
    order = RandomOrder(len(windows))
    return iter(DataLoader(windows, BATCH, sampler=order, num_workers=workers))


def check_equal(folder):
    """Ours and the peer's dataset give the same tokens for the same sample."""
    tokens = np.arange(5 * SEQ_LEN, dtype="<u2")
    path = folder / "small.bin"
    tokens.tofile(path)
    windows, corpus = Windows(path), Corpus(np.memmap(path, dtype="<u2", mode="r"), 1 << 16)
    for index in range(len(windows)):
        for ours, theirs in zip(corpus.sample(index, SEQ_LEN), windows[index], strict=True):
            assert np.array_equal(ours, theirs.numpy())
    os.unlink(path)


@pytest.mark.parametrize("verify", ["read", "size"])
def bench_batch_of_10_gb(compare, large, verify):
    """A batch of 16 samples of 2048 tokens; with ``read`` the blocks of each are checked first."""
    check_equal(large)
    source = source_of(open_data(configure(large, verify=verify)), configure(large))
    peers = {name: batches_of_dataloader(large, n) for n, name in enumerate(["loader", "worker"])}
    step = iter(range(10**9))
    compare(
        lambda: source.batch(next(step), range(BATCH)),
        2 * BATCH * SEQ_LEN * 8,
        {name: Peer(lambda batches=batches: next(batches)) for name, batches in peers.items()},
        rounds=100,
    )


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "inline"])
@pytest.mark.parametrize("data", ["text", "10-gb"])
def bench_waiting_in_training(benchmark, large, tmp_path, monkeypatch, data, ahead):
    """Part of the step time that the tiny preset waits for its batches, on one thread."""
    monkeypatch.setattr("mcp_parallel.trainer.Ahead", Ahead if ahead else inline)
    path = str(large / "tokens.bin") if data == "10-gb" else None
    config = Config.from_mapping(
        {
            "data": {"path": path},
            "train": {"steps": STEPS},
            "checkpoint": {"every": 0},
            "monitor": {"tensorboard": False},
        }
    )
    trainer = Trainer(config, data=open_data(config), run_dir=tmp_path)
    benchmark.pedantic(trainer.fit, rounds=1)
    rows = [json.loads(row) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    waited = sum(row["data_wait_share"] * row["step_time_s"] for row in rows)
    took = sum(row["step_time_s"] for row in rows)
    benchmark.extra_info["data_wait_share"] = float(f"{waited / took:.3g}")
    benchmark.extra_info["step_time_s"] = float(f"{took / len(rows):.3g}")
    if ahead and not benchmark.disabled:
        assert waited / took <= LIMIT, f"{waited / took:.2%} of the step time is waiting for data"


def inline(source, config):
    return Ahead(source, config, depth=0)
