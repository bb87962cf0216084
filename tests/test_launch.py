"""Local launch: real ranks that reduce, fail, die and are told to stop; nothing is left behind.

Launchers are forks of the test process, because tests send signals to them and kill them. Ranks
note down what they saw in a folder.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import PATIENCE_S

from mcp_parallel.launch.context import RankContext
from mcp_parallel.launch.local import launch_local

REPOSITORY = Path(__file__).parent.parent
# Generous: eight runs may share two cores. A launcher that hangs fails its test after this.
# Ranks that must be ended by force sleep far longer than that.
FOREVER_S = 3600.0

# ---------------------------------------------------------------- what ranks do


def all_reduce(context: RankContext) -> None:
    total = torch.ones(3) * (context.rank + 1)
    dist.all_reduce(total)
    assert total[0] == context.world_size * (context.world_size + 1) / 2


def note(folder: Path, context: RankContext, **facts: object) -> None:
    facts["pid"] = os.getpid()
    temporary = folder / f"{context.rank}.tmp"
    temporary.write_text(json.dumps(facts))
    temporary.rename(folder / f"rank{context.rank}.json")  # readers never see half a file


def report(context: RankContext, folder: Path) -> int:
    all_reduce(context)
    sys.stdout.write(f"stdout of {context.rank}\n")
    sys.stderr.write(f"stderr of {context.rank}\nsecond line\n")
    variables = {k: v for k, v in os.environ.items() if k.startswith(("RANK", "SLURM", "MASTER"))}
    note(
        folder,
        context,
        variables=variables,
        threads=torch.get_num_threads(),
        leads_session=os.getsid(0) == os.getpid(),
        listening=listening_addresses(os.getpid()) + listening_addresses(os.getppid()),
    )
    dist.barrier()
    return 0


def listening_addresses(pid: int) -> list[str]:
    """Local addresses (hex, as /proc/net/tcp has them) on which a process takes connections."""
    links = [
        os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()
    ]
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]


def fail_in_rank_2(context: RankContext, folder: Path) -> int:
    all_reduce(context)
    note(folder, context)
    dist.barrier()
    if context.rank == 2:
        raise ValueError("planted")
    if context.rank == 0:
        all_reduce(context)  # fails too, because rank 2 is gone
    time.sleep(FOREVER_S)  # neither notices rank 2 nor obeys SIGTERM
    return 0


def lose_rank_1(context: RankContext, folder: Path) -> int:
    all_reduce(context)
    note(folder, context)
    dist.barrier()
    if context.rank == 1:
        how = folder.name
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "segfault":
            ctypes.string_at(0)
        if how == "exit":
            os._exit(7)
        return 0
    all_reduce(context)
    return 0


def diverge(context: RankContext, folder: Path) -> int:
    note(folder, context)
    all_reduce(context)
    return 3


def train_until_stopped(context: RankContext, folder: Path) -> int:
    ready = False
    while True:
        stop = torch.tensor([float(context.stop_requested())])
        dist.all_reduce(stop)
        if stop.item():
            note(folder, context, votes=stop.item(), itself=context.stop_requested())
            return 4
        if not ready:
            (folder / f"ready{context.rank}").touch()
            ready = True
        time.sleep(0.02)


def sleep(context: RankContext, folder: Path) -> int:
    note(folder, context)
    (folder / f"ready{context.rank}").touch()
    time.sleep(FOREVER_S)
    return 0


# ---------------------------------------------------------------- how tests start them


class Launcher:
    """A process that runs ``launch_local``, with what it writes kept in files."""

    def __init__(self, entry, ranks: int, folder: Path, variables: dict[str, str]) -> None:
        self._streams = [folder / "stdout.txt", folder / "stderr.txt"]
        self.code: int | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # idle threads of this process
            self.pid = os.fork()
        if self.pid == 0:
            self._launch(entry, ranks, folder, variables)

    def _launch(self, entry, ranks: int, folder: Path, variables: dict[str, str]) -> None:
        code = 99
        try:
            for fd, path in enumerate(self._streams, start=1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), fd)
            sys.stdout, sys.stderr = (os.fdopen(fd, "w", encoding="utf-8") for fd in (1, 2))
            sys.platform = variables.pop("TEST_PLATFORM", sys.platform)
            os.environ.update(variables)
            code = launch_local(lambda context: entry(context, folder), ranks, timeout_s=PATIENCE_S)
        finally:
            os._exit(code)

    def text(self, fd: int) -> str:
        """What is on stdout (1) or stderr (2) by now."""
        path = self._streams[fd - 1]
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def is_running(self) -> bool:
        if self.code is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def finish(self) -> tuple[int, str, str]:
        """Wait for the end: status, stdout, stderr."""
        try:
            wait_until(lambda: not self.is_running(), "the end of the launcher")
        finally:
            self.kill()
        assert self.code is not None
        return self.code, self.text(1), self.text(2)

    def kill(self) -> None:
        if self.is_running():
            os.kill(self.pid, signal.SIGKILL)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def start():
    """``start(entry, ranks, folder, NAME=value)``: launchers that end with the test."""
    launchers: list[Launcher] = []

    def start_one(entry, ranks: int, folder: Path, **variables: str) -> Launcher:
        launchers.append(Launcher(entry, ranks, folder, variables))
        return launchers[-1]

    yield start_one
    for launcher in launchers:
        launcher.kill()


def notes(folder: Path, ranks: int) -> list[dict]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


@contextmanager
def hearing(number: int, handler):
    """What starts in here takes over this process's way with a signal."""
    was = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, was)


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.02)


def wait_ready(folder: Path, ranks: int) -> None:
    wait_until(lambda: len(list(folder.glob("ready*"))) == ranks, "all ranks ready")


def is_gone(pid: int) -> bool:
    """Whether no process ``pid`` runs; one that is dead but not yet reaped is gone too."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def assert_nobody_left(folder: Path, ranks: int, within_s: float = 0.0) -> None:
    """Also ends who is left, so that a launcher gone wrong burdens no other test."""
    pids = [facts["pid"] for facts in notes(folder, ranks)]
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and not all(map(is_gone, pids)):
        time.sleep(0.02)
    left = [pid for pid in pids if not is_gone(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


# ---------------------------------------------------------------- launches


def test_ranks_reduce_on_loopback_whatever_the_shell_left_behind(start, tmp_path):
    folder = tmp_path / "r\u00e9sultats d'\u00e9t\u00e9"
    folder.mkdir()
    leftovers = {
        "RANK": "7",
        "WORLD_SIZE": "99",
        "LOCAL_RANK": "5",
        "MASTER_ADDR": "192.0.2.1",  # reserved for documentation: nobody answers there
        "SLURM_PROCID": "3",
        "OMP_NUM_THREADS": "3",
        "MCP_BACKEND": "gloo",  # which listens on a network interface; shared memory has none
    }
    code, out, err = start(report, 4, folder, **leftovers).finish()
    assert code == 0, err
    assert out == "stdout of 0\n"
    for rank in (1, 2, 3):
        assert f"[rank {rank}] stderr of {rank}\n" in err
    assert err.count("second line\n") == 4
    for rank, facts in enumerate(notes(folder, 4)):
        assert facts["variables"] == {"RANK": str(rank)}
        assert facts["threads"] == 3
        assert facts["leads_session"]  # or a terminal's Ctrl-C would reach ranks past the launcher
        # The launcher's store and the rank's gloo socket, none on another address than 127.0.0.1.
        assert len(facts["listening"]) >= 2
        assert set(facts["listening"]) == {"0100007F"}
    assert_nobody_left(folder, 4)


def test_the_first_failure_is_named_first_and_everyone_else_is_ended(start, tmp_path):
    code, _, err = start(fail_in_rank_2, 4, tmp_path).finish()
    assert code == 1
    lines = err.splitlines()
    assert lines[0] == "rank 2 failed: ValueError: planted"
    assert lines[1].startswith("Traceback")
    assert lines.index("ValueError: planted") > [", in fail_in_rank_2" in x for x in lines].index(
        True
    )
    assert_nobody_left(tmp_path, 4)


@pytest.mark.parametrize(
    "how, words",
    [
        ("kill", "rank 1 was killed by SIGKILL (signal 9; often the out-of-memory killer)"),
        ("segfault", "rank 1 was killed by SIGSEGV (signal 11; a crash in compiled code)"),
        ("exit", "rank 1 ended with exit status 7 before its work was done"),
        ("leave", "rank 1 ended with status 0 while others were at work"),
    ],
)
def test_a_rank_that_is_lost_is_named_before_its_peers_complaints(start, tmp_path, how, words):
    folder = tmp_path / how
    folder.mkdir()
    code, _, err = start(lose_rank_1, 3, folder).finish()
    assert code == 1
    assert err.splitlines()[0] == words
    assert ("string_at" in err) == (how == "segfault")  # the stack of the crash comes along
    assert_nobody_left(folder, 3)


def test_an_error_of_all_ranks_is_told_once(start, tmp_path):
    code, _, err = start(report, 3, tmp_path, MCP_DEVICE="tpu").finish()
    assert code == 1
    assert err.count("MCP_DEVICE must be auto, cpu or cuda, got 'tpu'") == 2  # and in its traceback
    assert err.count("Traceback") == 1
    # A rank that was ended before it could speak is not in the list.
    assert re.search(r"\nthe same on ranks? \d( and \d)?\n$", err)


def test_a_status_that_all_ranks_return_is_the_status_of_the_job(start, tmp_path):
    code, _, err = start(diverge, 2, tmp_path).finish()
    assert (code, err) == (3, "")
    assert_nobody_left(tmp_path, 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_signal_reaches_every_rank_once_and_lets_it_finish(start, tmp_path, number):
    with hearing(signal.SIGHUP, signal.SIG_DFL):  # under nohup the tests are deaf to it
        launcher = start(train_until_stopped, 3, tmp_path)
    wait_ready(tmp_path, 3)
    launcher.send_signal(number)
    code, _, err = launcher.finish()
    assert code == 4
    assert err == "stopping after this step; a second signal ends all ranks at once\n"
    # One reduce may see the signal on some ranks only; that one already stops all of them.
    assert {facts["votes"] for facts in notes(tmp_path, 3)} <= {1.0, 2.0, 3.0}
    assert any(facts["itself"] for facts in notes(tmp_path, 3))
    assert_nobody_left(tmp_path, 3)


def test_nohup_is_honoured(start, tmp_path):
    with hearing(signal.SIGHUP, signal.SIG_IGN):
        launcher = start(train_until_stopped, 2, tmp_path)
    wait_ready(tmp_path, 2)
    launcher.send_signal(signal.SIGHUP)
    launcher.send_signal(signal.SIGTERM)
    code, _, err = launcher.finish()
    assert code == 4
    assert "at once:" not in err  # two stop signals would have ended the ranks


def test_a_second_signal_ends_ranks_that_do_not_listen(start, tmp_path):
    launcher = start(sleep, 2, tmp_path)
    wait_ready(tmp_path, 2)
    launcher.send_signal(signal.SIGINT)
    wait_until(lambda: "stopping after this step" in launcher.text(2), "the first signal's notice")
    launcher.send_signal(signal.SIGINT)
    code, _, err = launcher.finish()
    assert code == 4
    assert err.endswith("ending all ranks at once: steps since the last checkpoint are lost\n")
    assert_nobody_left(tmp_path, 2)


@pytest.mark.parametrize("platform", [sys.platform, "a system without prctl"])
def test_ranks_die_with_a_launcher_that_is_killed(start, tmp_path, platform):
    launcher = start(sleep, 2, tmp_path, TEST_PLATFORM=platform)
    wait_ready(tmp_path, 2)
    launcher.kill()
    assert_nobody_left(tmp_path, 2, within_s=PATIENCE_S)


def test_two_launches_run_side_by_side(start, tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    launchers = [start(train_until_stopped, 2, folder) for folder in folders]
    for folder in folders:
        wait_ready(folder, 2)
    launchers[0].send_signal(signal.SIGTERM)
    assert launchers[0].finish()[0] == 4
    assert launchers[1].is_running()  # stopping one does not touch the other
    launchers[1].send_signal(signal.SIGTERM)
    assert launchers[1].finish()[0] == 4
