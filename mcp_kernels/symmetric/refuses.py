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


def _group(name: str, device: torch.device, *, needs_cuda_op: bool = False) -> str | None:
    group = _comm.resolve(name)
    if group is None:
        return None
    found = agreement(group, device)
    if found.refusal is None and needs_cuda_op and not found.has_cuda_op:
        return "needs the CUDA collectives built on every rank"
    return found.refusal


def _matmul(x: Tensor, group: str) -> str | None:
    """float64 goes through cuBLAS and the CUDA collectives, all else through Triton."""
    is_wide = x.dtype == torch.float64
    return _dtype(x, _REDUCED) or _group(group, x.device, needs_cuda_op=is_wide)


def _collective(x: Tensor, num_bytes: int, group: str) -> str | None:
    if num_bytes > ALL_REDUCE_BYTES:
        return f"leaves more than {ALL_REDUCE_BYTES >> 20} MiB to the group's own collectives"
    return _dtype(x, _REDUCED) or _group(group, x.device, needs_cuda_op=True)


def _dtype(x: Tensor, taken: tuple[torch.dtype, ...]) -> str | None:
    if x.dtype in taken:
        return None
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in taken)
    return f"needs one of {names}, got {str(x.dtype).removeprefix('torch.')}"


def refuses_matmul_all_reduce(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str
) -> str | None:
    """Why the fused matmul and all-reduce cannot take a call."""
    return None if not group else _matmul(x, group)


def refuses_matmul_reduce_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, scatter_dim: int
) -> str | None:
    """Why the fused matmul and reduce-scatter cannot take a call."""
    return None if not group else _matmul(x, group)


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
        return _dtype(x, _REDUCED) or _group(group, x.device, needs_cuda_op=True)
    return _matmul(x, group)


def refuses_matmul_reduce_scatter_backward(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    needs: list[bool],
    group: str,
    scatter_dim: int,
    size: int,
) -> str | None:
    """Why rows of dx cannot be computed while those of dy arrive."""
    if not group:
        return "one rank has nothing to gather"
    if not needs[0] or weight is None:
        return "needs dx to compute while dy arrives"
    if scatter_dim == dy.dim() - 1:
        return "needs rows to gather, got scatter_dim on the out features"
    return _dtype(dy, _FUSED) or _group(group, dy.device)


def refuses_all_gather_matmul_backward(
    dys: list[Tensor],
    weights: list[Tensor],
    x: Tensor,
    needs: list[bool],
    group: str,
    gather_dim: int | None,
    gather_size: int | None,
    is_gathered: bool,
) -> str | None:
    """Why the CUDA collectives cannot sum dx, or gather x."""
    if not group:
        return None
    num_bytes = dys[0].shape[:-1].numel() * weights[0].shape[1] * x.element_size()
    return _collective(x, num_bytes, group)


def refuses_reduce_scatter(x: Tensor, group: str, scatter_dim: int) -> str | None:
    """Why the CUDA reduce-scatter cannot take a call."""
    return None if not group else _collective(x, x.numel() * x.element_size(), group)


def refuses_all_gather(
    x: Tensor, group: str, gather_dim: int, gather_size: int | None
) -> str | None:
    """Why the CUDA all-gather cannot take a call."""
    if not group:
        return None
    shape = _comm.gathered_shape(x, gather_dim, gather_size, group)
    return _collective(x, torch.Size(shape).numel() * x.element_size(), group)


def refuses_all_reduce(x: Tensor, group: str) -> str | None:
    """Why the CUDA all-reduce cannot take a call."""
    if not group:
        return None
    return _collective(x, x.numel() * x.element_size(), group)
