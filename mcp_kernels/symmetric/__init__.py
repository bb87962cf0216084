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
from mcp_kernels.symmetric.refuses import (
    refuses_all_gather,
    refuses_all_gather_matmul_backward,
    refuses_all_reduce,
    refuses_reduce_scatter,
)
from mcp_kernels.symmetric.settings import Settings, configure

__all__ = ["Settings", "check", "close", "configure", "register"]


def register() -> None:
    """Put the CUDA collectives, and what is made of them, on the CUDA key, where built."""
    if not hasattr(torch.ops.mcp_kernels, "symmetric_all_gather"):
        return
    for op, module, refuses in (
        ("all_reduce", "all_reduce", refuses_all_reduce),
        ("reduce_scatter", "scatter_gather", refuses_reduce_scatter),
        ("all_gather", "scatter_gather", refuses_all_gather),
        ("all_gather_matmul_backward", "streams", refuses_all_gather_matmul_backward),
    ):
        body = f"mcp_kernels.symmetric.{module}:{op}"
        override(op, body, "CUDA", backend="cuda", refuses=refuses)
