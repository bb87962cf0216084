"""Starting all ranks of a job on this machine by ``fork``: torch is imported once, not by each.

The launcher serves the ranks' meeting point (a TCPStore) on a loopback socket whose port the
system chose, so runs side by side and taken ports are no matter, and nobody outside this machine
can reach it.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mcp_parallel.launch import DEFAULT_TIMEOUT_S
from mcp_parallel.launch.cores import threads_per_rank
from mcp_parallel.launch.supervise import Supervisor

if TYPE_CHECKING:
    from mcp_parallel.launch.child import Entry


def launch_local(
    entry: Entry,
    world_size: int,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    preload: Sequence[str] = (),
    backend: str | None = None,
) -> int:
    """Run ``entry(context)`` in ``world_size`` processes of this machine and wait for all.

    Ranks are forks of this process: ``entry`` may be a closure, memory is shared until written.
    The default process group is there when ``entry`` starts and is taken down after it. Rank 0
    alone writes to stdout; stderr of the others is marked ``[rank N]``.

    SIGINT or SIGTERM here reaches every rank once, as ``context.stop_requested()``; a second one
    ends all ranks at once. When a rank fails, the others are ended, and its error is the first
    thing on stderr. Ranks don't outlive this process, even when it is killed.

    Call it from the main thread, before anything here has used CUDA, run an autograd backward or
    a multi-threaded torch op: none of these survives a fork.

    Args:
        entry: the body of a rank; returns its exit status (0 done, 3 diverged, 4 stopped).
        world_size: number of ranks, >= 1.
        timeout_s: how long a rank waits for another in a collective, in seconds.
        preload: names of modules to import once here rather than in every rank.
        backend: of the ranks' collectives on the CPU, "auto", "shm" or "gloo"; None takes
            ``MCP_BACKEND``.

    Returns:
        0 when all ranks returned 0, the status that ranks returned when that was another one,
        1 when a rank failed, 4 after a second signal.

    Raises:
        ValueError: ``world_size`` or ``timeout_s`` is out of range.
        RuntimeError: called from a thread, or after CUDA was used in this process.

    Cost: one import of torch, then a few tens of milliseconds a rank.
    """
    _check(world_size, timeout_s)
    _import_quietly("torch", "torch.distributed", "mcp_parallel.launch.child", *preload)
    with socket.socket() as listener, Supervisor() as supervisor:
        # Bound before the forks: ranks may connect before the store serves, the kernel queues them.
        listener.bind(("127.0.0.1", 0))
        listener.listen(max(128, 2 * world_size))
        _fork_ranks(entry, world_size, timeout_s, backend, listener, supervisor)
        store = _serve(listener, timeout_s)  # must live until the last rank has ended
        code = supervisor.wait()
        del store
    return code


def _import_quietly(*modules: str) -> None:
    """Import modules; torch, which asks the environment once, then logs errors alone."""
    variable = "TORCH_CPP_LOG_LEVEL"
    is_ours = variable not in os.environ
    os.environ.setdefault(variable, "ERROR")
    try:
        for name in modules:
            importlib.import_module(name)
    finally:
        if is_ours:
            del os.environ[variable]  # this process's other children are none of ours


def _check(world_size: int, timeout_s: float) -> None:
    if world_size < 1:
        raise ValueError(f"launch_local: world_size must be >= 1, got {world_size}")
    if not timeout_s > 0:
        raise ValueError(f"launch_local: timeout_s must be > 0, got {timeout_s}")
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "launch_local: must be called from the main thread, which alone receives signals, got "
            f"{threading.current_thread().name!r}"
        )
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        raise RuntimeError(
            "launch_local: CUDA must be untouched in the launching process, got an initialised "
            "one; a fork cannot use it. Use CUDA inside the entry only"
        )


def _fork_ranks(
    entry: Entry,
    world_size: int,
    timeout_s: float,
    backend: str | None,
    listener: socket.socket,
    supervisor: Supervisor,
) -> None:
    from mcp_parallel.launch.child import RankSpec, run_rank

    port: int = listener.getsockname()[1]
    threads = threads_per_rank(world_size)
    launcher_pid = os.getpid()
    # What exists now is shared with every rank for good: a collection would write to its pages.
    gc.collect()
    gc.freeze()
    for rank in range(world_size):
        report = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (the supervisor closes it)
        spec = RankSpec(
            rank=rank,
            world_size=world_size,
            port=port,
            threads=threads,
            timeout_s=timeout_s,
            backend=backend,
            launcher_pid=launcher_pid,
            report_fd=report.fileno(),
            lifeline_fd=supervisor.lifeline_fd,
            blocked_signals=supervisor.blocked_signals,
        )
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or both processes would write what is buffered
        pid = _fork()
        if pid == 0:
            run_rank(entry, spec, supervisor, listener)
        supervisor.add(pid, rank, report)
    gc.unfreeze()


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns of forks beside threads; ours hold no lock (idle BLAS and OpenMP workers).
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _serve(listener: socket.socket, timeout_s: float) -> Any:
    import torch.distributed as dist

    return dist.TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )
