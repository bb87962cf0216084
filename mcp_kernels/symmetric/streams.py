"""Tall products in chunks of rows: cuBLAS on one stream, the all-reduce of the last on another.

Source of the decomposition: torch's async tensor parallelism, from its description; the all-reduce
and its flags are ours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcp_kernels.ops import _comm
from mcp_kernels.symmetric.agree import agreement
from mcp_kernels.symmetric.all_reduce import choose_form, launch
from mcp_kernels.symmetric.channel import channel
from mcp_kernels.symmetric.layout import CUDA_ROWS

# Rows from which a chunk of a quarter still fills a GPU of 132 multiprocessors with 128 x 128 tiles
# at 4096 features.
MIN_ROWS = 4096
NUM_CHUNKS = 4

_second_streams: dict[int, torch.cuda.Stream] = {}


def has_streams(y: Tensor, group: str) -> bool:
    """Whether a product ``[M, N]`` goes this way: tall, and the CUDA all-reduce is everywhere."""
    found = _comm.resolve(group)
    if found is None or y.shape[0] < MIN_ROWS or not y.is_cuda:
        return False
    return agreement(found, y.device).has_cuda_op


def matmul_all_reduce_on_streams(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, group: str
) -> None:
    """Write the ranks' summed ``x @ weight.T + bias`` into ``y`` ``[M, N]``."""
    pg = _comm.resolve(group)
    assert pg is not None
    index = y.device.index or 0
    if index not in _second_streams:
        _second_streams[index] = torch.cuda.Stream(y.device)
    second, first = _second_streams[index], torch.cuda.current_stream(y.device)
    own_bias = bias if pg.rank() == 0 else None  # counted once
    for rows, target in zip(x.chunk(NUM_CHUNKS), y.chunk(NUM_CHUNKS), strict=True):
        part = rows @ weight.t() if own_bias is None else torch.addmm(own_bias, rows, weight.t())
        second.wait_stream(first)
        part.record_stream(second)
        with (
            torch.cuda.stream(second),
            channel("matmul_all_reduce on streams", group, y.device, CUDA_ROWS) as peers,
        ):
            num_bytes = part.numel() * part.element_size()
            form = choose_form(num_bytes, part.dtype, peers.world, peers.multicast != 0)
            target.copy_(launch(part, peers, form))
    first.wait_stream(second)
    y.record_stream(second)
