"""How ranks agree: JSON bytes in tensors. No object collectives, which unpickle a peer's bytes."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from mcp_parallel.checkpoint.format import CheckpointError, dump_json

Group = dist.ProcessGroup | None


def all_gather_json(value: Any, group: Group = None) -> list[Any]:
    """Every rank's ``value``, by rank; one process alone gets its own back.

    Args:
        value: anything JSON has a form for; it may differ in size between ranks.
        group: the ranks that take part; None is all of them.

    Cost: two all-gathers; world size times the longest value in memory.
    """
    payload = dump_json(value)
    if not is_distributed():
        return [json.loads(payload)]
    device = _device(group)
    world = dist.get_world_size(group)
    length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    lengths = [torch.zeros_like(length) for _ in range(world)]
    dist.all_gather(lengths, length, group=group)
    sizes = [int(n) for n in lengths]
    # Equal shapes on all ranks are what every backend's all-gather takes.
    mine = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    parts = [torch.zeros_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine, group=group)
    return [
        json.loads(part[:size].cpu().numpy().tobytes())
        for part, size in zip(parts, sizes, strict=True)
    ]


def raise_first(op: str, problems: list[str | None], refused: list[bool]) -> None:
    """Raise the first of ``problems`` (by rank) that is not None.

    Args:
        op: what failed.
        problems: words on it, of each rank.
        refused: whether the system refused, of each rank.

    Raises:
        CheckpointError: there is one.
    """
    for rank, problem in enumerate(problems):
        if problem is not None:
            by = f" (rank {rank} of {len(problems)})" if len(problems) > 1 else ""
            error = CheckpointError(f"{op}: {problem}{by}")
            error.is_refused = refused[rank]
            raise error


def rank_in(group: Group = None) -> int:
    """This process's rank in ``group``; 0 without torch.distributed."""
    return dist.get_rank(group) if is_distributed() else 0


def is_distributed() -> bool:
    """Whether there are other ranks to agree with."""
    return dist.is_available() and dist.is_initialized()


def _device(group: Group) -> torch.device:
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
