"""Watching ranks until all have ended: signals, first failure, nothing left behind. No torch."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from types import FrameType
from typing import BinaryIO

from mcp_parallel.errors import FAILED, OK, STOPPED, joined
from mcp_parallel.launch.report import RankEnd, in_order_of_blame, read_end

# After an end that looks like an effect, the cause (a rank still dying) gets this long to show up.
_CAUSE_WINDOW_S = 1.0
# After a cause, ends of the same moment are gathered, so that the earliest is named first.
_MOMENT_S = 0.2
# SIGTERM first, so that what a rank holds outside its memory can be put away.
_TERM_GRACE_S = 1.0
# All ranks return the same status (3, 4) at the same step; one that does not is stuck.
_AGREE_GRACE_S = 30.0

# Rank 0 may be drawing a progress bar: clear its line, and show the cursor that it hides.
_TERMINAL_RESET = "\r\x1b[2K\x1b[?25h"

# SIGHUP: the terminal or the connection is gone.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """Owns the launcher's signal handlers and the ranks' process ids from fork to last end.

    Use as a context manager around the forks; signals are blocked until ``wait`` is called.
    """

    def __init__(self) -> None:
        self._running: dict[int, int] = {}  # pid -> rank
        self._reports: dict[int, BinaryIO] = {}  # by rank
        self._ends: list[RankEnd] = []
        self._stop_signals = 0  # counted by the handler
        self._stops_obeyed = 0
        self._deadline_s: float | None = None  # when the rest is ended
        self._ending = False

    def __enter__(self) -> Supervisor:
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        # Ranks hold the reading end: it reads end of file when this process is gone.
        self.lifeline_fd, self._lifeline_write = os.pipe()
        self.blocked_signals = frozenset({*STOP_SIGNALS, signal.SIGCHLD})
        signal.pthread_sigmask(signal.SIG_BLOCK, self.blocked_signals)
        self._old_wakeup = signal.set_wakeup_fd(
            self._wake_write.fileno(), warn_on_full_buffer=False
        )
        self._old_handlers = {number: signal.getsignal(number) for number in self.blocked_signals}
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or self._old_handlers[number] != signal.SIG_IGN:  # nohup
                signal.signal(number, self._on_stop)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # only there to wake select
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._kill(signal.SIGKILL)
        for pid in list(self._running):
            os.waitpid(pid, 0)
        for report in self._reports.values():
            report.close()
        os.close(self.lifeline_fd)
        os.close(self._lifeline_write)
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.blocked_signals)
        self._wake_read.close()
        self._wake_write.close()

    def close_in_child(self) -> None:
        """Let go of the launcher's side in a process just forked."""
        os.close(self._lifeline_write)
        self._wake_read.close()
        self._wake_write.close()

    def add(self, pid: int, rank: int, report: BinaryIO) -> None:
        """Watch process ``pid`` as ``rank``; its report is ours to close."""
        self._running[pid] = rank
        self._reports[rank] = report

    def wait(self) -> int:
        """Wait until every rank has ended; return the exit status of the whole job."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.blocked_signals)
        while self._running:
            self._sleep()
            self._reap()
            self._obey_signals()
            if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
                self._end_the_rest()
        return self._verdict()

    def _sleep(self) -> None:
        timeout = None
        if self._deadline_s is not None:
            timeout = max(0.0, self._deadline_s - time.monotonic())
        select.select([self._wake_read], [], [], timeout)
        with contextlib.suppress(BlockingIOError):
            while self._wake_read.recv(4096):
                pass

    def _reap(self) -> None:
        for pid, rank in list(self._running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            del self._running[pid]
            _signal_group(pid, signal.SIGKILL)  # what the rank itself had started
            if self._ending:
                continue
            end = read_end(self._reports[rank], rank, status)
            self._ends.append(end)
            if end.failed:
                self._end_within(_CAUSE_WINDOW_S if end.is_effect else _MOMENT_S)
            elif end.code != OK:
                self._end_within(_AGREE_GRACE_S)

    def _end_within(self, seconds: float) -> None:
        deadline_s = time.monotonic() + seconds
        self._deadline_s = min(deadline_s, self._deadline_s or deadline_s)

    def _end_the_rest(self) -> None:
        """SIGTERM at the first call, SIGKILL at the next."""
        self._kill(signal.SIGKILL if self._ending else signal.SIGTERM)
        self._ending = True
        self._deadline_s = time.monotonic() + _TERM_GRACE_S

    def _kill(self, number: signal.Signals) -> None:
        for pid in self._running:
            _signal_group(pid, number)
            with contextlib.suppress(ProcessLookupError):  # before it has a group of its own
                os.kill(pid, number)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop_signals += 1  # no more than that: whatever it interrupted may be printing

    def _obey_signals(self) -> None:
        if self._stop_signals == self._stops_obeyed:
            return
        if self._stops_obeyed == 0:
            _say("stopping after this step; a second signal ends all ranks at once")
            for pid in self._running:
                os.kill(pid, signal.SIGTERM)
        if self._stop_signals > 1:
            if self._stops_obeyed < 2:
                _say("ending all ranks at once: steps since the last checkpoint are lost")
            self._ending = True
            self._kill(signal.SIGKILL)
        self._stops_obeyed = self._stop_signals

    def _verdict(self) -> int:
        if self._stops_obeyed > 1:
            return STOPPED
        blamed = in_order_of_blame(self._ends)
        if blamed:
            _say(_failure_text(blamed, self._ends))
            return FAILED
        codes = [end.code for end in sorted(self._ends, key=lambda end: end.at_s) if end.code]
        return codes[0] if codes else OK


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _failure_text(blamed: list[RankEnd], ends: list[RankEnd]) -> str:
    """What went wrong, the cause first; ranks that merely lost a peer share one line."""
    first = blamed[0]
    lines = []
    if first.is_effect:
        # Nobody else failed, so a rank that left early is why the connection closed.
        early = [end for end in ends if not end.failed and end.at_s <= first.at_s]
        lines += [f"{end.describe()} while others were at work" for end in early]
    lines.append(first.describe())
    if first.details:
        lines.append(first.details.rstrip())
    alike = sorted(end.rank for end in blamed[1:] if _is_same(end, first))
    if alike:
        lines.append(f"the same on {_ranks(alike)}")
    others = [end for end in blamed[1:] if not _is_same(end, first)]
    lines += [f"then {end.describe()}" for end in others if not end.is_effect]
    lost_a_peer = sorted(end.rank for end in others if end.is_effect)
    if lost_a_peer:
        lines.append(f"then lost a peer: {_ranks(lost_a_peer)}")
    return "\n".join(lines)


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {joined(numbers, last='and')}"


def _is_same(end: RankEnd, first: RankEnd) -> bool:
    return (end.kind, end.code, end.summary) == (first.kind, first.code, first.summary)


def _say(text: str) -> None:
    """Write to stderr whatever its encoding; a closed terminal is no reason to fail."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
        encoding = getattr(sys.stderr, "encoding", None) or "ascii"
        if sys.stderr.isatty():
            text = _TERMINAL_RESET + text
        sys.stderr.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        sys.stderr.flush()
