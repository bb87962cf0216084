"""What a process does between ``fork`` and its end as a rank. Needs torch."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import io
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from mcp_parallel.launch.context import RankContext, StopFlag, choose_device, join_group
from mcp_parallel.launch.report import write_raised, write_returned
from mcp_parallel.launch.supervise import Supervisor
from mcp_parallel.launch.variables import set_rank_variables

Entry = Callable[[RankContext], int]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpec:
    """What the launcher decided for one rank."""

    rank: int
    world_size: int
    port: int  # of the launcher's store on 127.0.0.1
    threads: int
    timeout_s: float
    backend: str | None  # as join_group takes it
    launcher_pid: int
    report_fd: int
    lifeline_fd: int  # reads end of file when the launcher is gone
    blocked_signals: frozenset[signal.Signals]  # blocked around the fork, unblocked by us


def run_rank(
    entry: Entry, spec: RankSpec, supervisor: Supervisor, listener: socket.socket
) -> NoReturn:
    """Be rank ``spec.rank``: join the others, run ``entry``, leave a report, end the process.

    ``supervisor`` and ``listener`` are the launcher's; this process lets go of them.
    """
    code = 1
    try:
        listener.close()
        supervisor.close_in_child()
        stop_flag = _become_a_rank(spec)
        code, at_s = _join_and_run(entry, spec, stop_flag)
        write_returned(spec.report_fd, code, at_s)
    except SystemExit as error:
        # A status given to sys.exit is no agreed result: the launcher reports it as an early end.
        code = error.code if isinstance(error.code, int) and error.code else 1
    except BaseException as error:
        write_raised(spec.report_fd, error, __file__)
    finally:
        # Straight out: the interpreter's own ending would run what belongs to the launcher.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _become_a_rank(spec: RankSpec) -> StopFlag:
    signal.set_wakeup_fd(-1)  # the launcher's, which a signal to this process must not wake
    os.setsid()  # a terminal's Ctrl-C now reaches the launcher alone
    die_with_parent(spec.launcher_pid, spec.lifeline_fd)
    stop_flag = StopFlag()
    stop_flag.install()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, spec.blocked_signals)
    atexit._clear()
    faulthandler.enable(spec.report_fd, all_threads=False)
    _own_streams(spec.rank)
    set_rank_variables(spec.rank, spec.world_size)
    os.environ["OMP_NUM_THREADS"] = str(spec.threads)
    torch.set_num_threads(spec.threads)
    return stop_flag


def die_with_parent(parent_pid: int, lifeline_fd: int) -> None:
    """Make this process end when the process ``parent_pid`` ends, however that ends.

    On Linux the kernel kills it at once, whatever it is doing. Everywhere a thread also watches
    ``lifeline_fd``, a pipe that the parent alone holds open for writing, and ends the whole
    process group, processes that a rank has started included.
    """

    def watch() -> None:
        os.read(lifeline_fd, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="mcp-lifeline", daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended between the fork and here
        os._exit(1)


class _PrefixedStream(io.TextIOBase):
    """Writes whole lines to a file descriptor, each after ``[rank N]``."""

    def __init__(self, fd: int, prefix: str, encoding: str) -> None:
        self._fd = fd
        self._prefix = prefix
        self._encoding = encoding
        self._pending = ""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, text: str, /) -> int:
        *lines, self._pending = (self._pending + text).split("\n")
        if lines:
            self._emit(lines)
        return len(text)

    def flush(self) -> None:
        if self._pending:
            self._emit([self._pending])
            self._pending = ""

    def _emit(self, lines: list[str]) -> None:
        block = "".join(f"{self._prefix}{line}\n" for line in lines)
        # One write a block, so that lines of several ranks don't mix.
        os.write(self._fd, block.encode(self._encoding, "backslashreplace"))


def _own_streams(rank: int) -> None:
    """Rank 0 speaks for the job; the others are silent but for stderr, which names them."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    if rank == 0:
        os.close(null)
        return
    os.dup2(null, 1)
    os.close(null)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = _PrefixedStream(2, f"[rank {rank}] ", sys.stderr.encoding or "ascii")
    warnings.simplefilter("ignore")  # rank 0 shows the same ones


def _join_and_run(entry: Entry, spec: RankSpec, stop_flag: StopFlag) -> tuple[int, float]:
    """The status that ``entry`` returned, and when."""
    timeout = timedelta(seconds=spec.timeout_s)
    client = dist.TCPStore(
        "127.0.0.1", spec.port, is_master=False, wait_for_workers=False, timeout=timeout
    )
    store = dist.PrefixStore("attempt0", client)
    device = choose_device(spec.rank, spec.world_size)
    join_group(
        store,
        rank=spec.rank,
        world_size=spec.world_size,
        device=device,
        timeout_s=spec.timeout_s,
        backend=spec.backend,
    )
    context = RankContext(
        rank=spec.rank,
        world_size=spec.world_size,
        local_rank=spec.rank,
        device=device,
        store=store,
        stop_flag=stop_flag,
    )
    code, at_s = entry(context), time.monotonic()
    if not isinstance(code, int):
        raise TypeError(f"launch_local: entry must return an exit status, got {code!r}")
    if dist.is_initialized():
        dist.destroy_process_group()
    atexit._run_exitfuncs()
    return code, at_s
