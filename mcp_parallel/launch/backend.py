"""Which backend carries the ranks' collectives: a decision of all ranks together. Needs torch."""

from __future__ import annotations

import importlib
import os
import warnings

import torch
import torch.distributed as dist

BACKENDS = ("auto", "shm", "gloo")


def wanted_backend() -> str:
    """What ``MCP_BACKEND`` asks for: ``auto`` (shm where every rank can), ``shm`` or ``gloo``.

    Raises:
        ValueError: it is another word.
    """
    wanted = os.environ.get("MCP_BACKEND", "auto").lower()
    if wanted not in BACKENDS:
        raise ValueError(f"launch: MCP_BACKEND must be auto, shm or gloo, got {wanted!r}")
    return wanted


def why_not_shm() -> str:
    """Why shared memory cannot be used here; "" where it can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # said once by whoever imports the kernels
        kernels = importlib.import_module("mcp_kernels")
    info = kernels.build_info()
    return "" if info.extensions["_shm"] else info.reasons["_shm"] or "it was not built"


def register_shm() -> None:
    """Make torch.distributed know the backend."""
    importlib.import_module("mcp_kernels.shm")


def agree_on_backend(
    store: dist.Store,
    *,
    rank: int,
    world_size: int,
    device: torch.device,
    wanted: str,
    missing: str,
) -> str:
    """The name for ``init_process_group``, the same on every rank.

    Ranks whose ``MCP_BACKEND`` differ, or of which some lack the compiled module, agree before
    anyone joins: ``gloo`` when any asks for it, ``shm`` when all can.

    Args:
        store: of this attempt alone.
        rank: of this process.
        world_size: ranks of the job.
        device: where this rank trains. On CUDA the CPU side carries little: gloo unless asked.
        wanted: "auto", "shm" or "gloo".
        missing: why this rank cannot use shared memory, "" when it can.

    Raises:
        RuntimeError: shm was asked for and some rank cannot.

    Cost: two requests to the store.
    """
    if wanted == "auto" and device.type == "cuda":
        wanted = "gloo"
    store.set(f"backend/{rank}", f"{wanted}:{missing}")
    votes = [
        value.decode().split(":", 1)
        for value in store.multi_get([f"backend/{peer}" for peer in range(world_size)])
    ]
    words = {word for word, _ in votes}
    reasons = {peer: why for peer, (_, why) in enumerate(votes) if why}
    cpu = "gloo" if "gloo" in words or reasons else "shm"
    if "shm" in words and cpu == "gloo":
        peer, why = next(iter(reasons.items()), (None, "another rank asks for gloo"))
        where = "" if peer is None else f" on rank {peer}"
        raise RuntimeError(
            f"launch: MCP_BACKEND=shm must be possible on every rank, got a refusal{where}: {why}; "
            "build the extension (pip install .) or set MCP_BACKEND=gloo"
        )
    return f"cpu:{cpu},cuda:nccl" if device.type == "cuda" else cpu
