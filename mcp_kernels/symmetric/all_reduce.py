"""The body of ``all_reduce`` on GPUs that reach each other: one CUDA kernel, no NCCL."""

from __future__ import annotations

import torch
from torch import Tensor

from mcp_kernels.symmetric.channel import channel
from mcp_kernels.symmetric.layout import CUDA_MAX_BLOCKS, CUDA_ROWS
from mcp_kernels.symmetric.peers import Peers

ONE_SHOT, TWO_SHOT, MULTICAST = range(3)
# Bytes up to which one exchange of flags and W reads beat two exchanges (vLLM's measured limits on
# NVLink); two ranks read as much either way.
ONE_SHOT_BYTES = {4: 512 << 10, 8: 256 << 10}
# Below it the switch's latency costs more than it saves (vLLM's table on B300: one-shot to 1 MiB).
MULTICAST_BYTES = 1 << 20


def choose_form(num_bytes: int, dtype: torch.dtype, world: int, has_multicast: bool) -> int:
    """The form for a sum of ``num_bytes``; from numbers that every rank has."""
    if has_multicast and dtype != torch.float64 and world > 2 and num_bytes > MULTICAST_BYTES:
        return MULTICAST
    most = next((most for ranks, most in ONE_SHOT_BYTES.items() if world <= ranks), 0)
    return ONE_SHOT if world <= 2 or num_bytes <= most else TWO_SHOT


def launch(x: Tensor, peers: Peers, form: int) -> Tensor:
    """The sum of contiguous ``x`` over the ranks of ``peers``, by one kernel a slot."""
    return torch.ops.mcp_kernels.symmetric_all_reduce(
        x,
        peers.buffers,
        peers.error,
        peers.rank,
        peers.multicast,
        peers.layout.slot_bytes,
        peers.timeout_ns,
        form,
        min(CUDA_MAX_BLOCKS, peers.num_programs),
    )


def all_reduce(x: Tensor, group: str) -> Tensor:
    """The body of ``all_reduce`` on the CUDA key; arguments as there, checked before."""
    if not group or x.numel() == 0:
        return x.clone(memory_format=torch.contiguous_format)
    with channel("all_reduce", group, x.device, CUDA_ROWS) as peers:
        num_bytes = x.numel() * x.element_size()
        form = choose_form(num_bytes, x.dtype, peers.world, peers.multicast != 0)
        return launch(x.contiguous(), peers, form)
