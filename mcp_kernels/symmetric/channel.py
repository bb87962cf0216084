"""Channels: a symmetric buffer for each (op, stream) of a group, made at its first call.

Two ops, or one op on two streams, never share flags. A channel is made once, at its full size, and
kept; its first call is a rendezvous of the group and cannot be captured in a CUDA graph. Later
calls allocate nothing but their result and wait for nothing on the host.

Kernels of one group on several streams wait for peers while they hold multiprocessors, and two
ranks might start them in different orders. So each launch first waits, on its stream, for the
group's launch before it. Inside a capture the graph keeps its own order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcp_kernels.ops import _comm
from mcp_kernels.symmetric import agree
from mcp_kernels.symmetric.agree import agreement
from mcp_kernels.symmetric.layout import Layout, read_error
from mcp_kernels.symmetric.peers import Peers
from mcp_kernels.symmetric.settings import settings


@dataclass(frozen=True, slots=True)
class Channel:
    """A channel's buffers and what keeps them alive."""

    op: str
    peers: Peers
    buffer: Tensor
    handle: Any
    """torch's symmetric memory handle."""


_channels: dict[tuple[str, str, int, int], Channel] = {}
_last_launch: dict[tuple[str, int], tuple[int, torch.cuda.Event]] = {}


@contextmanager
def channel(op: str, group: str, device: torch.device, num_rows: int = 0) -> Iterator[Peers]:
    """The channel of ``op`` on the current stream; launches go inside the block.

    Args:
        op: whose channel, and the name in its errors.
        group: name of a group that agreed to use symmetric memory.
        device: the GPU.
        num_rows: rows of flags where the op needs another number than the settings have.

    Yields:
        What kernels are started with.

    Raises:
        RuntimeError: an earlier call of the channel timed out, or the first call is captured.
    """
    stream = torch.cuda.current_stream(device)
    key = (group, op, device.index or 0, stream.cuda_stream)
    found = _channels.get(key)
    if found is None:
        found = _channels[key] = _make(op, group, device, num_rows)
    raise_error(op, found.peers)
    is_capturing = torch.cuda.is_current_stream_capturing()
    turn = (group, device.index or 0)
    if not is_capturing and turn in _last_launch:
        last_stream, event = _last_launch[turn]
        if last_stream != stream.cuda_stream:
            stream.wait_event(event)
    yield found.peers
    if not is_capturing:
        event = _last_launch[turn][1] if turn in _last_launch else torch.cuda.Event()
        event.record(stream)
        _last_launch[turn] = (stream.cuda_stream, event)


def raise_error(op: str, peers: Peers) -> None:
    """Raise what an earlier kernel wrote down.

    Raises:
        RuntimeError: naming the op, the call and the rank that did not come.
    """
    missed = read_error(int(peers.error))
    if missed is not None:
        raise RuntimeError(
            f"{op}: rank {missed.rank} must take part in call {missed.epoch} of this channel "
            f"within {peers.timeout_ns / 1e9:g} s, got nothing from it (this is rank {peers.rank} "
            f"of {peers.world}); results since are NaN. Look for the first error on rank "
            f"{missed.rank}; then end the process group and start again"
        )


def check(group: dist.ProcessGroup | None = None) -> None:
    """Raise where a kernel of ``group`` timed out, after waiting for what is queued on the GPU.

    Args:
        group: None is the world. Useful after replaying CUDA graphs, which no call precedes.

    Raises:
        RuntimeError: as the next call would.
    """
    name = _comm.group_name(group)
    for (owner, op, device, _), found in _channels.items():
        if owner == name:
            torch.cuda.synchronize(device)
            raise_error(op, found.peers)


def close(group: dist.ProcessGroup | None = None) -> None:
    """Give back the buffers of ``group``, on every rank and before the group is destroyed."""
    name = _comm.group_name(group)
    for key in [key for key in _channels if key[0] == name]:
        torch.cuda.synchronize(key[2])
        del _channels[key]
    for key in [key for key in _last_launch if key[0] == name]:
        del _last_launch[key]
    agree.forget(name)


def _make(op: str, group_name: str, device: torch.device, num_rows: int) -> Channel:
    """Allocate, zero and exchange a buffer: a collective of the group."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{op}: the first call on a stream must be outside CUDA graph capture, got one inside; "
            "call it once on this stream before capturing"
        )
    from torch.distributed import _symmetric_memory as symm_mem  # imports much, needs a GPU build

    group = _comm.resolve(group_name)
    assert group is not None
    current = settings()
    layout = Layout(group.size(), num_rows or current.num_rows, current.slot_bytes)
    buffer = symm_mem.empty(layout.buffer_bytes // 8, dtype=torch.int64, device=device)
    handle = symm_mem.rendezvous(buffer, group)
    buffer.zero_()
    torch.cuda.synchronize(device)
    handle.barrier(channel=0)  # nobody raises a flag before all of them are zero
    torch.cuda.synchronize(device)
    views = [handle.get_buffer(peer, (1,), torch.int64) for peer in range(group.size())]
    table = torch.tensor([view.data_ptr() for view in views], device=device)
    multicast = int(handle.multicast_ptr)
    if multicast:
        multicast += int(getattr(handle, "offset", 0))
    peers = Peers(
        rank=group.rank(),
        layout=layout,
        buffers=table,
        error=torch.zeros(1, dtype=torch.int64, pin_memory=True),
        timeout_ns=int(current.timeout_s * 1e9),
        num_programs=agreement(group, device).num_programs,
        multicast=multicast,
    )
    return Channel(op, peers, buffer, handle)
