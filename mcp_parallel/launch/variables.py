"""Environment variables of launchers: which job is this process part of? No torch."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from mcp_parallel.errors import BAD_CONFIG, DIVERGED, OK, STOPPED, ConfigError, shown
from mcp_parallel.launch import DEFAULT_TIMEOUT_S
from mcp_parallel.topology import cuts_around

EXIT_FILE = "MCP_EXIT_FILE"
"""Names the file into which ranks of torchrun write a status that a restart would not change."""
TIMEOUT = "MCP_TIMEOUT_S"
"""Seconds that a rank waits for another, where the default is not right."""

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Left behind by another launcher, these would tell libraries wrong ranks and sizes.
_FOREIGN_PREFIXES = ("SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "ROLE_", "GROUP_")
_FOREIGN_NAMES = (*_RENDEZVOUS, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")


def under_torchrun(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun (or a launcher that sets all it sets) started this process as a rank.

    Single variables left over in a shell don't count.
    """
    if not all(environ.get(name) for name in _RENDEZVOUS):
        return False
    elastic = "TORCHELASTIC_RUN_ID" in environ
    return elastic or ("LOCAL_RANK" in environ and "GROUP_RANK" in environ)


def wanted_timeout_s(environ: Mapping[str, str] = os.environ) -> float:
    """Seconds that a rank waits for another: ``MCP_TIMEOUT_S``, or the default.

    Raises:
        ConfigError: it is no number of seconds.
    """
    text = environ.get(TIMEOUT, "")
    if not text:
        return DEFAULT_TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        problem = f"launch: {TIMEOUT} must be a number of seconds above 0, got {shown(text)}"
        raise ConfigError([f"{problem}; use {DEFAULT_TIMEOUT_S:g}, or unset it"])
    return seconds


def settled_status(status: int, environ: Mapping[str, str] = os.environ) -> int:
    """The exit status of this process, for a ``status`` of ``train``.

    torchrun starts ranks anew whatever they ended with. Where ``MCP_EXIT_FILE`` names a file, its
    ranks write a status that a restart would not change (2, 3) or must not (4) into it and end
    with 0; the script that started torchrun reads it.
    """
    path = environ.get(EXIT_FILE)
    if not path or not under_torchrun(environ) or status not in (BAD_CONFIG, DIVERGED, STOPPED):
        return status
    Path(path).write_text(f"{status}\n", encoding="ascii")
    return OK


def own_cuts(environ: Mapping[str, str] = os.environ) -> list[int]:
    """Where the host of this rank of torchrun begins and ends among the ranks of the job.

    Empty where the job stands on one host, or the variables do not say.
    """
    words = [environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if not under_torchrun(environ) or not all(word.isdigit() for word in words):
        return []
    rank, local_rank, count = map(int, words)
    return cuts_around(rank - local_rank, count, int(environ["WORLD_SIZE"]))


def local_ranks(environ: Mapping[str, str] = os.environ) -> int | None:
    """Ranks that the launcher started on this host; None where none did."""
    text = environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def wanted_device(environ: Mapping[str, str] = os.environ) -> str:
    """``MCP_DEVICE``: auto, cpu or cuda."""
    return environ.get("MCP_DEVICE", "auto").lower()


def rank_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Names of the variables set that tell a process its place in some launcher's job."""
    return [
        name for name in environ if name.startswith(_FOREIGN_PREFIXES) or name in _FOREIGN_NAMES
    ]


def set_rank_variables(rank: int, world_size: int) -> None:
    """Give this process the variables of a rank of a local job, without those of any other job."""
    for name in rank_variables():
        del os.environ[name]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    # gloo otherwise takes the interface that the hostname resolves to, which may be none or slow.
    interface = loopback_interface()
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def loopback_interface() -> str | None:
    """Name of the loopback network interface ("lo", "lo0"), None when it has an unusual name."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)
