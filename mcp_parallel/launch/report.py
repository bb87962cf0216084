"""How a rank ended: what it leaves for its launcher, and which of several came first. No torch.

Each rank has a file that it inherits from the launcher. Before it ends it writes one JSON line
there; when it crashes, faulthandler has written its stack there instead. A file rather than a
pipe: it takes a traceback of any length without a reader, and outlives the rank.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from dataclasses import dataclass
from typing import BinaryIO, Literal

Kind = Literal["returned", "raised", "exited", "killed"]

# What a rank says when a peer went away first: an effect of the failure, not its cause.
_EFFECTS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connectfullmesh failed",
    "broken pipe",
    "connection was likely closed",
    "remote process exited",
    "timed out waiting",
    "wait timeout",
    "socket timeout",
    # mcp_kernels.shm, of a peer that died, of one that did not come, of one that was interrupted.
    "the first error of that rank says why",
    "see what holds that rank up",
    "was interrupted on rank",
)

# Signals that nobody sends by accident, with the usual reason.
_USUAL_REASON = {
    signal.SIGKILL: "often the out-of-memory killer",
    signal.SIGBUS: "often a full /dev/shm or a truncated file under a memory map",
    signal.SIGSEGV: "a crash in compiled code",
    signal.SIGILL: "an instruction that this processor lacks; MCP_CPU_ISA=scalar avoids ours",
    signal.SIGABRT: "compiled code gave up, see its message above",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnd:
    """The end of one rank."""

    rank: int
    at_s: float  # on the monotonic clock, which all processes of a host share
    kind: Kind
    code: int  # exit status; the signal's number when killed
    summary: str = ""
    details: str = ""  # traceback or stack, may be empty
    is_effect: bool = False  # says that a peer went away, so the cause lies with another rank

    @property
    def failed(self) -> bool:
        """Whether the rank ended in another way than by returning a status it chose."""
        return self.kind != "returned"

    def describe(self) -> str:
        """One line: who and what."""
        if self.kind == "returned":
            return f"rank {self.rank} ended with status {self.code}"
        if self.kind == "raised":
            return f"rank {self.rank} failed: {self.summary}"
        if self.kind == "killed":
            return f"rank {self.rank} was killed by {_signal_words(self.code)}"
        return f"rank {self.rank} ended with exit status {self.code} before its work was done"


def _signal_words(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    reason = _USUAL_REASON.get(signal.Signals(number))
    return f"{name} (signal {number}; {reason})" if reason else f"{name} (signal {number})"


def _is_effect(error: BaseException) -> bool:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if any(words in str(link).lower() for words in _EFFECTS):
            return True
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return False


def write_returned(fd: int, code: int, at_s: float) -> None:
    """Tell the launcher that the entry returned ``code`` at monotonic time ``at_s``."""
    _write(fd, {"kind": "returned", "code": code, "at_s": at_s})


def write_raised(fd: int, error: BaseException, own_file: str) -> None:
    """Tell the launcher that the entry raised ``error`` just now.

    Frames of ``own_file`` at the top of the traceback, which led to the entry, are left out.
    """
    stack = traceback.TracebackException.from_exception(error)
    while len(stack.stack) > 1 and stack.stack[0].filename == own_file:
        del stack.stack[0]
    _write(
        fd,
        {
            "kind": "raised",
            "code": 1,
            "at_s": time.monotonic(),
            "summary": "".join(traceback.format_exception_only(type(error), error)).strip(),
            "details": "".join(stack.format()),
            "is_effect": _is_effect(error),
        },
    )


def _write(fd: int, record: dict[str, object]) -> None:
    line = json.dumps(record).encode() + b"\n"
    while line:
        line = line[os.write(fd, line) :]


def read_end(report: BinaryIO, rank: int, wait_status: int) -> RankEnd:
    """Put together how ``rank`` ended from its report and the status that ``waitpid`` gave."""
    report.seek(0)
    text = report.read().decode("utf-8", "replace").strip()
    code = os.waitstatus_to_exitcode(wait_status)
    if code >= 0 and text.startswith("{"):
        return RankEnd(rank=rank, **json.loads(text.splitlines()[0]))
    kind: Kind = "killed" if code < 0 else "exited"
    return RankEnd(rank=rank, at_s=time.monotonic(), kind=kind, code=abs(code), details=text)


def in_order_of_blame(ends: list[RankEnd]) -> list[RankEnd]:
    """Failed ends, the one to blame first: causes before effects, earlier before later.

    A rank killed by a signal other than SIGABRT is always a cause. No other rank's error can
    have done it, yet its time is known only from when the launcher noticed, often later than the
    peers' complaints. SIGABRT can be an effect: a communication thread aborts when a peer is gone.
    """

    def key(end: RankEnd) -> tuple[bool, bool, float]:
        killed_from_outside = end.kind == "killed" and end.code != signal.SIGABRT
        return end.is_effect, not killed_from_outside, end.at_s

    return sorted((end for end in ends if end.failed), key=key)
