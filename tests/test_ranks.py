"""The rank set itself: results in order, failures named, a new set after a failure, no orphans."""

from __future__ import annotations

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, RankPool


def _sum_of_ranks(rank: int, world: int) -> tuple[int, int, float]:
    x = torch.full((3,), float(rank + 1))
    dist.all_reduce(x)
    return rank, dist.get_world_size(), float(x[0])


def _fail_on_last(rank: int, world: int) -> None:
    if rank == world - 1:
        raise KeyError("planted")
    dist.barrier()


def _die(rank: int, world: int) -> None:
    if rank == 0:
        os._exit(7)


def _sleep(rank: int, world: int) -> None:
    time.sleep(30 * rank)


def _pid(rank: int, world: int) -> int:
    return os.getpid()


def test_default_group_is_the_ranks_of_the_run(ranks: RankPool) -> None:
    for world in (3, 1, 4, 2):
        expected = world * (world + 1) / 2
        assert ranks.run(_sum_of_ranks, ranks=world) == [(r, world, expected) for r in range(world)]


def test_failure_names_rank_and_shows_traceback() -> None:
    pool = RankPool(2)
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2: Traceback.*KeyError: 'planted'"):
        pool.run(_fail_on_last)
    with pytest.raises(RankError, match="rank 0 of 2: the process died"):
        pool.run(_die)
    with pytest.raises(RankError, match=r"rank 1 of 2: no answer within 0\.3 s"):
        pool.run(_sleep, timeout=0.3)
    assert pool.run(_sum_of_ranks) == [(0, 2, 3.0), (1, 2, 3.0)]
    pids = pool.run(_pid)
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_too_many_ranks_is_refused(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match=r"ranks must be in \[1, 4\], got 5"):
        ranks.run(_pid, ranks=5)


def _draw_and_warn(rank: int, world: int) -> list[float]:
    warnings.warn("heard by its own test", stacklevel=1)
    warnings.simplefilter("ignore")  # not for the next run
    return torch.rand(3).tolist()


def _leave_a_variable(rank: int, world: int) -> None:
    os.environ["MCP_LEFT_BEHIND"] = "1"


def test_runs_start_alike(ranks: RankPool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        first = ranks.run(_draw_and_warn, ranks=2)
        assert ranks.run(_draw_and_warn, ranks=2) == first
    with pytest.raises(RankError, match="UserWarning: heard by its own test"):
        ranks.run(_draw_and_warn, ranks=2)


def test_what_a_run_leaves_behind_is_named() -> None:
    pool = RankPool(1)
    with pytest.raises(RankError, match=r"environment: was .*MCP_LEFT_BEHIND.*None.*is .*1"):
        pool.run(_leave_a_variable)
    pool.close()
