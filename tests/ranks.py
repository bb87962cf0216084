"""A set of ranks for tests: forked once, each in a gloo group on loopback, given many functions.

    def reduce(rank, world, shape):
        x = torch.full(shape, float(rank))
        torch.distributed.all_reduce(x)  # the default group is the ranks of this run
        return x

    def test_reduce(ranks):
        results = ranks.run(reduce, (2, 3), ranks=2)  # one result a rank

A function is sent by name, so it stands at the top of its module. Ranks are forked after torch is
imported, which makes a set of four cost less than a second. A rank that raises, dies or hangs
fails the test with its traceback; the whole set is then ended and forked anew at the next run.

Ranks outlive a test, so each run starts alike: with the filters of warnings that its own test has,
torch's generator at the same seed, and everything that ``global_state`` knows as it was before.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist
from global_state import changes, snapshot

PR_SET_PDEATHSIG = 1
# What does not come within this long never will, however many others share the cores: half of what
# pytest gives a test. For every wait of a test that ends as soon as what it waits for is there.
PATIENCE_S = 300.0
# After one rank fails the others may wait for it for ever; they get this long to report too.
GRACE_S = 1.0


class RankError(AssertionError):
    """What went wrong on the ranks of a run, with their tracebacks."""


class RankPool:
    """``world_size`` forked ranks that run functions on demand."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._pids: list[int] = []
        self._pipes: list[Any] = []
        self._folder = ""
        self._runs = 0

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        ranks: int | None = None,
        timeout: float = PATIENCE_S,
    ) -> list[Any]:
        """``fn(rank, world, *args)`` on the first ``ranks`` ranks, whose default group they are.

        Args:
            fn: a top-level function.
            *args: pickled; every rank gets its own copy.
            ranks: how many take part, all by default.
            timeout: seconds after which a rank counts as hung.

        Returns:
            What each rank returned, in rank order.

        Raises:
            RankError: a rank raised, died or hung.
        """
        count = self.world_size if ranks is None else ranks
        if not 1 <= count <= self.world_size:
            raise ValueError(f"RankPool.run: ranks must be in [1, {self.world_size}], got {count}")
        if not self._pids:
            self._start()
        self._runs += 1
        request = pickle.dumps((fn, count, args, self._runs, warnings.filters))
        try:
            for pipe in self._pipes[:count]:
                pipe.send_bytes(request)
            replies = self._collect(count, time.monotonic() + timeout, timeout)
        except BaseException:
            self.close(kill=True)
            raise
        failures = {rank: text for rank, (ok, text) in replies.items() if not ok}
        if failures:
            self.close(kill=True)
            texts = (f"rank {rank} of {count}: {text}" for rank, text in sorted(failures.items()))
            raise RankError("\n".join(texts))
        return [replies[rank][1] for rank in range(count)]

    def close(self, kill: bool = False) -> None:
        """End every rank, and wait until it is gone."""
        for pipe in self._pipes:
            pipe.close()  # a rank ends when its pipe does
        for pid in self._pids:
            if kill:
                os.kill(pid, signal.SIGKILL)  # not reaped yet, so the id is still this child's
            _reap(pid)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._pids, self._pipes, self._folder = [], [], ""

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        store = os.path.join(self._folder, "store")
        parent_pid = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(self.world_size):
            ours, theirs = Pipe()
            with warnings.catch_warnings():
                # Python 3.12 warns of threads; an idle torch's hold no lock that a rank needs.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                for pipe in (*self._pipes, ours):
                    pipe.close()
                _serve(theirs, rank, self.world_size, store, parent_pid)
            theirs.close()
            self._pids.append(pid)
            self._pipes.append(ours)

    def _collect(self, count: int, deadline: float, timeout: float) -> dict[int, tuple[bool, Any]]:
        """One ``(ok, result or reason)`` of each rank."""
        replies: dict[int, tuple[bool, Any]] = {}
        rank_of: dict[Any, int] = {self._pipes[rank]: rank for rank in range(count)}
        while rank_of:
            ready: list[Any] = wait(list(rank_of), max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in rank_of.values():
                    replies[rank] = (False, f"no answer within {timeout} s")
                return replies
            for pipe in ready:
                rank = rank_of.pop(pipe)
                try:
                    replies[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    replies[rank] = (False, "the process died")
                if not replies[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return replies


def _serve(pipe: Any, rank: int, world: int, store: str, parent_pid: int) -> None:
    """Life of a rank: join the groups, run what comes, end with the pipe. Never returns."""
    status = 0
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)  # the parent was gone before it could be followed
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=PATIENCE_S),
        )
        groups = {n: dist.new_group(list(range(n))) for n in range(1, world)}
        groups[world] = dist.group.WORLD
        while True:
            try:
                request = pipe.recv_bytes()
            except EOFError:
                break
            pipe.send_bytes(_answer(request, rank, groups))
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _answer(request: bytes, rank: int, groups: dict[int, Any]) -> bytes:
    world_group = dist.group.WORLD
    try:
        fn, count, args, run, filters = pickle.loads(request)
        # torch names a new group by a count of its own, which ranks that sat a run out lack; give
        # all of them the same start, with room for the groups of one run.
        dist.distributed_c10d._world.group_count = run * 10_000
        dist.distributed_c10d._update_default_pg(groups[count])
        torch.default_generator.manual_seed(0)
        before = snapshot()
        with warnings.catch_warnings():
            warnings.resetwarnings()
            warnings.filters[:] = filters
            result = pickle.dumps((True, fn(rank, count, *args)))
        left = list(changes(before, snapshot()))
        assert not left, "left behind for later runs: " + "; ".join(left)
        return result
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))
    finally:
        dist.distributed_c10d._update_default_pg(world_group)


def _reap(pid: int) -> None:
    deadline = time.monotonic() + 5.0
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
