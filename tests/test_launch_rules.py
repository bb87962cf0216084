"""The rules of launching, without ranks: blame, threads, devices, refusals."""

from __future__ import annotations

import signal
import threading

import pytest
import torch

from mcp_parallel.launch import cores
from mcp_parallel.launch.context import choose_device
from mcp_parallel.launch.local import launch_local
from mcp_parallel.launch.report import RankEnd, in_order_of_blame


def test_wrong_calls_are_refused():
    with pytest.raises(ValueError, match="launch_local: world_size must be >= 1, got 0"):
        launch_local(lambda context: 0, 0)
    with pytest.raises(ValueError, match="launch_local: timeout_s must be > 0, got nan"):
        launch_local(lambda context: 0, 1, timeout_s=float("nan"))
    errors: list[BaseException] = []

    def call() -> None:
        try:
            launch_local(lambda context: 0, 1)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "must be called from the main thread" in str(errors[0])


def end(rank: int, at_s: float, kind="raised", code=1, is_effect=False) -> RankEnd:
    return RankEnd(rank=rank, at_s=at_s, kind=kind, code=code, is_effect=is_effect)


def test_blame_goes_to_causes_before_effects_and_to_the_earliest():
    ends = [
        end(0, 1.0, is_effect=True),
        end(1, 3.0),
        end(2, 2.0),
        end(3, 4.0, kind="killed", code=signal.SIGKILL),  # noticed last, yet nobody's effect
        end(4, 1.5, kind="killed", code=signal.SIGABRT),
        end(5, 0.5, kind="returned", code=0),
    ]
    assert [blamed.rank for blamed in in_order_of_blame(ends)] == [3, 4, 2, 1, 0]


def test_threads_follow_the_user_else_share_affinity_and_quota(monkeypatch, tmp_path):
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(cores, "_QUOTA_V2", quota)
    monkeypatch.setattr(cores, "affinity_cores", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    quota.write_text("max 100000\n")
    assert [cores.threads_per_rank(ranks) for ranks in (1, 3, 16, 64)] == [16, 5, 1, 1]
    quota.write_text("450000 100000\n")
    assert cores.usable_cores() == 4
    quota.write_text("50000 100000\n")
    assert cores.usable_cores() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "6,2")
    assert cores.threads_per_rank(64) == 6
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert cores.threads_per_rank(64) == 1


def test_the_device_can_be_forced_and_a_wrong_word_is_refused(monkeypatch):
    monkeypatch.setenv("MCP_DEVICE", "cpu")
    assert choose_device(0, 1) == torch.device("cpu")
    monkeypatch.setenv("MCP_DEVICE", "tpu")
    with pytest.raises(ValueError, match="MCP_DEVICE must be auto, cpu or cuda, got 'tpu'"):
        choose_device(0, 1)
    monkeypatch.setenv("MCP_DEVICE", "cuda")
    with pytest.raises(ValueError, match="must have a device for each of the 4096 ranks"):
        choose_device(0, 4096)
