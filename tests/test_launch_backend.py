"""The ranks of a job agree on what carries their collectives before any of them joins."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from mcp_parallel.doctor.software import software_findings
from mcp_parallel.launch import backend
from mcp_parallel.launch.local import launch_local

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
UNBUILT = "the compiler failed"


def agree(wishes, *, unbuilt=(), device=CPU):
    """What each rank decides, or the error that it raises; ranks are threads here."""
    store, world = dist.HashStore(), len(wishes)

    def decide(rank):
        try:
            return backend.agree_on_backend(
                store,
                rank=rank,
                world_size=world,
                device=device,
                wanted=wishes[rank],
                missing=UNBUILT if rank in unbuilt else "",
            )
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(decide, range(world)))


@pytest.mark.parametrize(
    ("wishes", "unbuilt", "chosen"),
    [
        (["auto", "auto"], [], "shm"),
        (["auto", "shm"], [], "shm"),
        (["auto", "gloo"], [], "gloo"),
        (["auto", "auto"], [1], "gloo"),
        (["gloo", "gloo"], [0, 1], "gloo"),
    ],
)
def test_all_ranks_take_the_same(wishes, unbuilt, chosen):
    assert agree(wishes, unbuilt=unbuilt) == [chosen] * 2


def test_what_cannot_be_had_is_an_error_on_all():
    for text in agree(["shm", "auto"], unbuilt=[1]):
        assert f"must be possible on every rank, got a refusal on rank 1: {UNBUILT}" in text
    for text in agree(["shm", "gloo"]):
        assert "got a refusal: another rank asks for gloo" in text


def test_on_cuda_shared_memory_is_only_for_who_asks():
    assert agree(["auto", "auto"], device=CUDA) == ["cpu:gloo,cuda:nccl"] * 2
    assert agree(["shm", "shm"], device=CUDA) == ["cpu:shm,cuda:nccl"] * 2


def test_the_word_is_checked(monkeypatch):
    monkeypatch.setenv("MCP_BACKEND", "mpi")
    with pytest.raises(ValueError, match="MCP_BACKEND must be auto, shm or gloo, got 'mpi'"):
        backend.wanted_backend()
    findings = {finding.topic: finding for finding in software_findings()}
    assert findings["shared memory"].status == "problem"


@pytest.mark.parametrize("wanted", ["shm", "gloo"])
def test_ranks_run_on_what_was_asked_for(tmp_path, wanted):
    if wanted == "shm":
        pytest.importorskip("mcp_kernels._shm", reason="the _shm extension was not built")

    def entry(context):
        x = torch.tensor([1.0])
        dist.all_reduce(x)
        (tmp_path / str(context.rank)).write_text(f"{dist.get_backend()} {x.item()}")
        return 0

    assert launch_local(entry, 2, backend=wanted) == 0
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == [f"{wanted} 2.0"] * 2
