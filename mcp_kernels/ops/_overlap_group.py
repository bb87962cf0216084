"""Whether a group's collectives can run under a product, and pay: one answer on every rank.

gloo moves bytes with the ranks' own cores. Between hosts most of that time is the wire's; on one
host it is all copying, which a rank that multiplies meanwhile only slows down (pieces then cost up
to a tenth, measured at two ranks with a core each). So a gloo group asks once, at its first call
that is large enough, whether its ranks stand on one host; shared memory serves those. A group of
backend shm knows: it communicates in pieces where each of its ranks has a host of its own.
"""

from __future__ import annotations

import hashlib
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcp_kernels._op import is_looking
from mcp_kernels.ops import _comm

ONE_HOST = "gloo between ranks of one host takes the cores that multiply; backend shm is for them"
SHARED = "a call of backend shm is done when it returns, among ranks of one host"
NOT_ASKED = "decided by the group at its first call of such a size"

_hosts: dict[str, tuple[weakref.ref[Any], int]] = {}


def why_not(x: Tensor, group: str) -> str | None:
    """Why the ranks of ``group`` do not communicate while they multiply, in words.

    Cost: for a gloo group, at its first call, one all-gather of a number.
    """
    if not group:
        return "one rank has nothing to send"
    pg: Any = _comm.resolve(group)
    backend = _comm.backend_name(pg, x)
    if backend == "shm":
        return None if _is_rank_a_host(pg) else SHARED
    if backend != "gloo":
        return None
    known = _hosts.get(group)
    if known is None or known[0]() is not pg:  # another group may have had its name
        if is_looking():
            return NOT_ASKED
        known = _hosts[group] = (weakref.ref(pg), _count_hosts(pg, x.device))
    return ONE_HOST if known[1] == 1 else None


def carrier(x: Tensor, group: str) -> _comm.GroupCarrier:
    """What carries the pieces of ``x`` for a group that takes them.

    A group of backend shm whose ranks all stand alone has nothing but the network, and its gloo
    group of all ranks does not wait in a call.
    """
    pg: Any = _comm.resolve(group)
    # The same group may carry tensors on a GPU, by another backend.
    return _comm.GroupCarrier(pg._comm.flat if _comm.backend_name(pg, x) == "shm" else pg)


def _is_rank_a_host(pg: Any) -> bool:
    return len(pg.place.hosts) == pg.size()


def _count_hosts(pg: Any, device: torch.device) -> int:
    mine = torch.tensor([host_number()], device=device)
    return len(set(_comm.start_gather_parts(mine, pg)().view(-1).tolist()))


def host_number() -> int:
    """63 bits that stand for the running system, the same in each of its processes."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    text = boot.read_text(encoding="ascii") if boot.exists() else str(torch.initial_seed())
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
