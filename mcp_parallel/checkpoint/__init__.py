"""Checkpoints: safetensors shards and a JSON manifest, saved at one layout and loaded at any.

A step folder ``step_00000123/`` holds one shard for each rank that has something to write and
``manifest.json``, which is written last. Planning (who writes what, who reads which part) is
PyTorch DCP's; the bytes on disk are ours, because DCP's own reader unpickles its metadata and
keeps no checksums.

The half that needs no torch (find, verify, prune) imports none, so that a command can refuse a
damaged checkpoint before it pays for ``import torch``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mcp_parallel.checkpoint.format import CheckpointError
from mcp_parallel.checkpoint.manifest import Manifest
from mcp_parallel.checkpoint.steps import find_latest, prune, step_name, verify

if TYPE_CHECKING:
    from mcp_parallel.checkpoint.io import load, save
    from mcp_parallel.checkpoint.planning import LocalChunk

__all__ = [
    "CheckpointError",
    "LocalChunk",
    "Manifest",
    "find_latest",
    "load",
    "prune",
    "save",
    "step_name",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in ("load", "save"):
        from mcp_parallel.checkpoint import io

        return getattr(io, name)
    if name == "LocalChunk":
        from mcp_parallel.checkpoint.planning import LocalChunk

        return LocalChunk
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
