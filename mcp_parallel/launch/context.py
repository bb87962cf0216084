"""What a rank knows about itself, and how it joins the others. Needs torch."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist

from mcp_parallel.launch.backend import (
    agree_on_backend,
    register_shm,
    wanted_backend,
    why_not_shm,
)


class StopFlag:
    """Remembers that the process was asked to stop, so that the step in flight can end first."""

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> None:
        """From now on SIGTERM, SIGINT and SIGHUP set the flag. Main thread only."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._set)

    def _set(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


@dataclass(frozen=True, kw_only=True, slots=True)
class RankContext:
    """One rank of a running job, its process group already joined."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    store: dist.Store
    """Of this attempt alone."""
    job_store: dist.Store | None = None
    """Outlives restarts by torchrun where torchrun's own store does; None in a local run."""
    stop_flag: StopFlag = field(default_factory=StopFlag)

    def stop_requested(self) -> bool:
        """Whether this rank was asked to stop (SIGTERM); the ranks have yet to agree on it."""
        return self.stop_flag.requested


def choose_device(local_rank: int, local_world_size: int) -> torch.device:
    """CUDA when each rank of this host has a device of its own, otherwise the CPU.

    ``MCP_DEVICE=cpu`` keeps ranks off the devices, ``MCP_DEVICE=cuda`` insists on them.

    Raises:
        ValueError: ``MCP_DEVICE`` is another word, or ``cuda`` with fewer devices than ranks.
    """
    wanted = os.environ.get("MCP_DEVICE", "auto").lower()
    if wanted not in ("auto", "cpu", "cuda"):
        raise ValueError(f"launch: MCP_DEVICE must be auto, cpu or cuda, got {wanted!r}")
    if wanted == "cpu":
        return torch.device("cpu")
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices >= local_world_size:
        return torch.device("cuda", local_rank)
    if wanted == "cuda":
        raise ValueError(
            f"launch: MCP_DEVICE=cuda must have a device for each of the {local_world_size} ranks "
            f"here, got {devices}; start {max(devices, 1)} ranks or set MCP_DEVICE=cpu"
        )
    if devices and local_rank == 0:
        sys.stderr.write(
            f"training on the CPU: {local_world_size} ranks here, but {devices} CUDA devices\n"
        )
    return torch.device("cpu")


def join_group(
    store: dist.Store,
    *,
    rank: int,
    world_size: int,
    device: torch.device,
    timeout_s: float,
    backend: str | None = None,
) -> None:
    """Start the default process group and make sure that every rank chose the same device type.

    Args:
        store: of this attempt alone.
        rank: of this process.
        world_size: ranks of the job.
        device: where this rank trains.
        timeout_s: how long a rank waits for another, in seconds.
        backend: "auto", "shm" or "gloo"; None takes ``MCP_BACKEND``.

    Raises:
        RuntimeError: some ranks have a CUDA device and some have none; or "shm" cannot be had.
        ValueError: ``MCP_BACKEND`` is another word.
    """
    timeout = timedelta(seconds=timeout_s)
    name = agree_on_backend(
        store,
        rank=rank,
        world_size=world_size,
        device=device,
        wanted=backend or wanted_backend(),
        missing=why_not_shm(),
    )
    if "shm" in name:
        register_shm()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        name,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    on_cuda = int(device.type == "cuda")
    votes = torch.tensor([on_cuda, -on_cuda])
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)  # [every rank has one, -(any rank has one)]
    if votes[0].item() != -votes[1].item():
        raise RuntimeError(
            "launch: every rank must train on the same kind of device, got CUDA on some and none "
            "on others; set MCP_DEVICE=cpu or give every host a device for each rank"
        )
