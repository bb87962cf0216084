"""Symmetric memory between the GPUs of a group: who can use it, its buffers, and errors from it.

``layout`` says what lies where in a buffer, ``agree`` lets a group decide together, ``channel``
makes and keeps the buffers. The kernels are in ``mcp_kernels.triton`` and ``csrc/cuda``.

``configure(Settings(...))`` sets sizes and the timeout before the first call; ``check(group)``
raises what a replayed CUDA graph met; ``close(group)`` gives the buffers back.
"""

from __future__ import annotations

import torch

from mcp_kernels._op import override
from mcp_kernels.symmetric.channel import check, close
from mcp_kernels.symmetric.refuses import refuses_all_reduce
from mcp_kernels.symmetric.settings import Settings, configure

__all__ = ["Settings", "check", "close", "configure", "register"]


def register() -> None:
    """Put the CUDA all-reduce on the CUDA key, where it was built."""
    if hasattr(torch.ops.mcp_kernels, "symmetric_all_reduce"):
        body = "mcp_kernels.symmetric.all_reduce:all_reduce"
        override("all_reduce", body, "CUDA", backend="cuda", refuses=refuses_all_reduce)
