"""Ranks that torchrun starts: known by their variables, and safe from what dead attempts left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import PATIENCE_S

from mcp_parallel.launch.context import RankContext
from mcp_parallel.launch.env import agree_on_attempt, run_from_env
from mcp_parallel.launch.variables import under_torchrun

REPOSITORY = Path(__file__).parent.parent


def restart_once(context: RankContext, folder: Path) -> int:
    total = torch.ones(1)
    dist.all_reduce(total)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt == 0 and context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(total)
    (folder / f"rank{context.rank}").write_text(f"attempt {attempt}, total {total.item()}")
    return 0


def test_torchrun_restarts_a_rank_on_the_store_of_the_dead_attempt(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--max-restarts=1", "--monitor-interval=0.1", __file__]
    result = subprocess.run(
        [*command, "restart_once", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text() == "attempt 1, total 4.0"


def test_only_a_full_set_of_variables_makes_a_rank_of_torchrun():
    rendezvous = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    elastic = {**rendezvous, "TORCHELASTIC_RUN_ID": "none"}
    assert under_torchrun(elastic)
    assert under_torchrun({**rendezvous, "LOCAL_RANK": "0", "GROUP_RANK": "0"})
    assert not under_torchrun(rendezvous)
    assert not under_torchrun({**rendezvous, "LOCAL_RANK": "0"})
    for name in rendezvous:
        assert not under_torchrun({k: v for k, v in elastic.items() if k != name})


def test_ranks_agree_on_an_attempt_that_no_dead_rank_had():
    world_size, store = 4, dist.HashStore()
    # A dead attempt: rank 0 counted itself in, rank 2 said hello and was answered.
    assert store.add("attempts", 1) == 1
    store.set("hello/2", "dead")
    store.set("answer/dead", "1")
    store.set("seen/1/2", "")

    def agree_all() -> list[int]:
        got: dict[int, int] = {}

        def agree(rank: int) -> None:
            time.sleep(0.1 * rank)  # rank 0 meets the dead rank's hello first
            got[rank] = agree_on_attempt(
                store, rank=rank, world_size=world_size, timeout_s=PATIENCE_S
            )

        threads = [threading.Thread(target=agree, args=(rank,)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [got[rank] for rank in range(world_size)]

    assert agree_all() == [2] * world_size
    assert agree_all() == [3] * world_size


def test_a_rank_that_never_arrives_is_named():
    with pytest.raises(RuntimeError, match="waited for rank 1 to arrive"):
        agree_on_attempt(dist.HashStore(), rank=0, world_size=2, timeout_s=0.05)


if __name__ == "__main__":  # as a rank of torchrun: SCENARIO FOLDER
    scenario, where = globals()[sys.argv[1]], Path(sys.argv[2])
    sys.exit(run_from_env(lambda context: scenario(context, where), timeout_s=PATIENCE_S))
