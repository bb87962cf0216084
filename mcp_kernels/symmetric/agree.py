"""Whether a group uses symmetric memory: one answer, the same on every rank.

Each rank tells the others what it has; from the same facts all come to the same answer. What only
one rank can see (whether it reaches a peer's memory) is told in a second round. Asked once for each
group and device, at the first call, which is where ranks are in step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
import torch.distributed as dist

from mcp_kernels.symmetric.settings import settings

_MIN_CAPABILITY = 80  # release and acquire at system scope, and kernels tried for it


@dataclass(frozen=True, slots=True)
class Facts:
    """What one rank tells the others; all are numbers of at most 63 bits."""

    host: int
    """The same for ranks of one running system."""
    device: int
    """The same for ranks on one GPU."""
    num_programs: int
    """Multiprocessors of the GPU."""
    capability: int
    """90 for sm_90."""
    has_cuda_op: int
    """Whether the CUDA collectives were built."""
    configured: int
    """Slot size, rows and timeout."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """What a group found together."""

    refusal: str | None
    """Why its GPUs do not use symmetric memory, in words; None where they do."""
    num_programs: int
    """Multiprocessors of the smallest GPU."""
    has_cuda_op: bool
    """Whether every rank has the CUDA collectives."""


_agreements: dict[tuple[str, torch.device], Agreement] = {}


def agreement(group: dist.ProcessGroup, device: torch.device) -> Agreement:
    """What ``group`` agreed on for its GPUs; asked at the first call, which is a collective.

    Raises:
        RuntimeError: the first call is inside a CUDA graph capture.
    """
    key = (group.group_name, device)
    if key not in _agreements:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "symmetric memory: the first call of a group must be outside CUDA graph capture, "
                "got one inside; call the op once before capturing"
            )
        _agreements[key] = ask(group, device, own_facts(device), _reaches)
    return _agreements[key]


def forget(group_name: str) -> None:
    """Drop what a group agreed on."""
    for key in [key for key in _agreements if key[0] == group_name]:
        del _agreements[key]


def decide(facts: list[Facts]) -> Agreement:
    """The answer that follows from what all ranks told."""
    refusal = None
    hosts = {f.host for f in facts}
    oldest = min(f.capability for f in facts)
    if len(hosts) > 1:
        refusal = f"needs all ranks on one host, got {len(hosts)} hosts"
    elif len({f.device for f in facts}) < len(facts):
        refusal = "needs a GPU for each rank, got ranks that share one"
    elif oldest < _MIN_CAPABILITY:
        refusal = f"needs sm_{_MIN_CAPABILITY} or newer on every rank, got sm_{oldest}"
    elif len({f.configured for f in facts}) > 1:
        refusal = "needs equal settings on every rank, got different ones (symmetric.configure)"
    return Agreement(
        refusal,
        num_programs=min(f.num_programs for f in facts),
        has_cuda_op=all(f.has_cuda_op for f in facts),
    )


def ask(
    group: dist.ProcessGroup,
    device: torch.device,
    mine: Facts,
    reaches: Callable[[list[Facts]], bool],
) -> Agreement:
    """Tell ``mine`` to the group and decide with it: two small collectives.

    Args:
        group: all of its ranks call.
        device: where the numbers travel.
        mine: this rank's facts.
        reaches: whether this rank reaches the GPUs of all, by what they told.

    Returns:
        The same on every rank.
    """
    row = torch.tensor([getattr(mine, f.name) for f in fields(Facts)], device=device)
    told = torch.empty(group.size() * row.numel(), dtype=row.dtype, device=device)
    group._allgather_base(told, row).wait()
    facts = [Facts(*numbers) for numbers in told.view(group.size(), -1).tolist()]
    answer = decide(facts)
    reached = torch.tensor([int(reaches(facts))], device=device)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MIN  # pyright: ignore[reportAttributeAccessIssue]
    group.allreduce([reached], options).wait()
    if answer.refusal is None and not int(reached):
        return replace(
            answer, refusal="needs peer access between all GPUs of the group, got a pair without"
        )
    return answer


def own_facts(device: torch.device) -> Facts:
    """What this rank has."""
    found = torch.cuda.get_device_properties(device)
    current = settings()
    return Facts(
        host=_number(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")),
        device=_number(str(found.uuid)),
        num_programs=found.multi_processor_count,
        capability=10 * found.major + found.minor,
        has_cuda_op=int(hasattr(torch.ops.mcp_kernels, "symmetric_all_gather")),
        configured=_number(repr(current)),
    )


def _reaches(facts: list[Facts]) -> bool:
    """Whether the driver lets this process reach the GPUs it can see among the ranks'.

    A GPU hidden from this process (CUDA_VISIBLE_DEVICES) cannot be asked about; where it is out of
    reach, the rendezvous raises on every rank.
    """
    own = torch.cuda.current_device()
    told = {f.device for f in facts}
    for peer in range(torch.cuda.device_count()):
        is_rank = _number(str(torch.cuda.get_device_properties(peer).uuid)) in told
        if is_rank and peer != own and not torch.cuda.can_device_access_peer(own, peer):
            return False
    return True


def _number(text: str) -> int:
    """63 bits that stand for ``text``."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
