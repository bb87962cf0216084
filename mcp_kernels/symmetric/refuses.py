"""What the symmetric-memory bodies leave to the references, in words. Needs no Triton.

An answer may depend only on what is equal on all ranks: what a rank refuses, all refuse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcp_kernels.ops import _comm
from mcp_kernels.symmetric.agree import agreement

_FUSED = (torch.float32, torch.bfloat16, torch.float16)
_REDUCED = (*_FUSED, torch.float64)
# From here on NCCL's rings and trees were faster in published tables (vLLM on B300: 64 MiB).
ALL_REDUCE_BYTES = 64 << 20


def _group(name: str, device: torch.device) -> str | None:
    group = _comm.resolve(name)
    return None if group is None else agreement(group, device).refusal


def _dtype(x: Tensor, taken: tuple[torch.dtype, ...]) -> str | None:
    if x.dtype in taken:
        return None
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in taken)
    return f"needs one of {names}, got {str(x.dtype).removeprefix('torch.')}"


def refuses_matmul_all_reduce(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str
) -> str | None:
    """Why the fused matmul and all-reduce cannot take a call."""
    return None if not group else _dtype(x, _FUSED) or _group(group, x.device)


def refuses_matmul_reduce_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, scatter_dim: int
) -> str | None:
    """Why the fused matmul and reduce-scatter cannot take a call."""
    return None if not group else _dtype(x, _FUSED) or _group(group, x.device)


def refuses_all_gather_matmul(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    group: str,
    gather_dim: int | None,
    gather_size: int | None,
    save_gathered: bool,
) -> str | None:
    """Why the fused gather and matmul cannot take a call."""
    if not group or gather_dim is None:
        return None
    if gather_dim == x.dim() - 1:
        return "needs rows to gather, got gather_dim on the in features"
    return _dtype(x, _FUSED) or _group(group, x.device)


def refuses_all_reduce(x: Tensor, group: str) -> str | None:
    """Why the CUDA all-reduce cannot take a call."""
    if not group:
        return None
    num_bytes = x.numel() * x.element_size()
    if num_bytes > ALL_REDUCE_BYTES:
        return f"leaves more than {ALL_REDUCE_BYTES >> 20} MiB to the group's own all-reduce"
    reason = _dtype(x, _REDUCED) or _group(group, x.device)
    if reason is None:
        found = _comm.resolve(group)
        if found is not None and not agreement(found, x.device).has_cuda_op:
            return "needs the CUDA all-reduce built on every rank"
    return reason
