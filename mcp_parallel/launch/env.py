"""Being a rank that torchrun started: join the job that the environment variables name.

torchrun keeps one store for all restarts of a job. Whoever reads a key of a dead attempt there
(gloo's addresses, NCCL's unique id) fails or hangs, so the ranks first agree on a prefix that no
earlier attempt has used. Source of the fault: pytorch/pytorch#135712.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from mcp_parallel.launch import DEFAULT_TIMEOUT_S
from mcp_parallel.launch.context import RankContext, StopFlag, choose_device, join_group
from mcp_parallel.launch.cores import threads_per_rank

_PREFIX = "mcp"
_POLL_S = 0.05


def run_from_env(
    entry: Callable[[RankContext], int], *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> int:
    """Run ``entry`` as the rank that the environment names; return its exit status.

    A traceback also goes where torchrun looks for it, so that its summary shows the first failure.
    """

    @record
    def body() -> int:
        code = entry(init_from_env(timeout_s=timeout_s))
        dist.destroy_process_group()
        return code

    return cast(int, body())


def init_from_env(*, timeout_s: float = DEFAULT_TIMEOUT_S) -> RankContext:
    """Join the default process group of the job that torchrun's variables describe.

    Args:
        timeout_s: how long a rank waits for the others, here and in each collective, in seconds.

    Raises:
        ValueError: a variable is no number.
        RuntimeError: not all ranks arrived within ``timeout_s``.

    Cost: three small messages a rank to the store, then gloo's full mesh.
    """
    rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    local_rank = _number("LOCAL_RANK")
    local_world_size = _number("LOCAL_WORLD_SIZE", world_size)
    stop_flag = StopFlag()
    stop_flag.install()
    torch.set_num_threads(threads_per_rank(local_world_size))
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        _number("MASTER_PORT"),
        # torchrun's agent serves the store unless told not to; then rank 0 does.
        is_master=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
    job_store = dist.PrefixStore(_PREFIX, store)
    attempt = agree_on_attempt(job_store, rank=rank, world_size=world_size, timeout_s=timeout_s)
    store = dist.PrefixStore(f"{_PREFIX}/attempt{attempt}", store)
    device = choose_device(local_rank, local_world_size)
    join_group(store, rank=rank, world_size=world_size, device=device, timeout_s=timeout_s)
    return RankContext(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        device=device,
        store=store,
        job_store=job_store,
        stop_flag=stop_flag,
    )


def agree_on_attempt(store: dist.Store, *, rank: int, world_size: int, timeout_s: float) -> int:
    """A number that all ranks alive now share and that no earlier attempt on ``store`` had.

    TORCHELASTIC_RESTART_COUNT would not do: each agent counts its own restarts. Rank 0 takes the
    next number of a counter. Every other rank says hello under its rank with a random word and
    is answered under that word, so what dead ranks left in the store is never taken for an
    answer; rank 0 asks again until the word it answered is one whose owner has read it.

    Raises:
        RuntimeError: a rank did not arrive within ``timeout_s`` seconds.
    """
    deadline_s = time.monotonic() + timeout_s
    if rank == 0:
        attempt = store.add("attempts", 1)
        for peer in range(1, world_size):
            seen = f"seen/{attempt}/{peer}"
            while not store.check([seen]):
                if store.check([f"hello/{peer}"]):
                    store.set(f"answer/{store.get(f'hello/{peer}').decode()}", str(attempt))
                _pause(deadline_s, f"rank {peer} to arrive")
        return attempt
    word = secrets.token_hex(8)
    store.set(f"hello/{rank}", word)
    while not store.check([f"answer/{word}"]):
        _pause(deadline_s, "rank 0 to answer")
    attempt = int(store.get(f"answer/{word}"))
    store.set(f"seen/{attempt}/{rank}", "")
    return attempt


def _pause(deadline_s: float, awaited: str) -> None:
    if time.monotonic() > deadline_s:
        raise RuntimeError(
            f"launch: every rank must join before the timeout, got none: waited for {awaited}; "
            "see that all hosts run the same command and reach MASTER_ADDR"
        )
    time.sleep(_POLL_S)


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdigit():
        raise ValueError(f"launch: {name} must be a number, got {text!r}; start with torchrun")
    return int(text)
