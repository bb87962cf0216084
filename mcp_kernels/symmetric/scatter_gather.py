"""The bodies of ``reduce_scatter`` and ``all_gather`` on GPUs that reach each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mcp_kernels.ops import _comm
from mcp_kernels.symmetric.all_reduce import choose_form
from mcp_kernels.symmetric.all_reduce import launch as launch_sum
from mcp_kernels.symmetric.channel import channel
from mcp_kernels.symmetric.layout import CUDA_MAX_BLOCKS, CUDA_ROWS
from mcp_kernels.symmetric.peers import Peers

Launch = Callable[[Tensor, Peers], Tensor]


def launch_scatter(packed: Tensor, peers: Peers) -> Tensor:
    """Sum over the ranks of ``packed[rank]``; ``packed`` is contiguous ``[W, ...]``."""
    return torch.ops.mcp_kernels.symmetric_reduce_scatter(packed, *_arguments(peers))


def launch_gather(x: Tensor, peers: Peers) -> Tensor:
    """The ranks' contiguous ``x``, equal in shape, as ``[W, ...]``."""
    return torch.ops.mcp_kernels.symmetric_all_gather(x, *_arguments(peers))


def launch_all_reduce(x: Tensor, peers: Peers) -> Tensor:
    """The sum of contiguous ``x``, in the form that suits its size."""
    num_bytes = x.numel() * x.element_size()
    form = choose_form(num_bytes, x.dtype, peers.world, peers.multicast != 0)
    return launch_sum(x, peers, form)


def _arguments(peers: Peers) -> tuple[Tensor, Tensor, int, int, int, int]:
    blocks = min(CUDA_MAX_BLOCKS, peers.num_programs)
    slot_bytes, timeout_ns = peers.layout.slot_bytes, peers.timeout_ns
    return peers.buffers, peers.error, peers.rank, slot_bytes, timeout_ns, blocks


@dataclass(frozen=True, slots=True)
class SymmetricCarrier:
    """Collectives over symmetric memory as a ``_comm.Carrier``.

    On a second stream they go on under what the caller computes; on the caller's own they are
    queued in between. ``finish`` never waits on the host.
    """

    op: str
    """Whose channel, and the name in its errors."""
    group: str
    device: torch.device
    rank: int
    world: int
    second: torch.cuda.Stream | None = None

    def start_sum_(self, x: Tensor) -> _comm.Finish:
        """See ``_comm.Carrier``."""

        def sum_in_place(x: Tensor, peers: Peers) -> Tensor:
            return x.copy_(launch_all_reduce(x, peers))

        return self._start(x, sum_in_place) if x.numel() else lambda: x

    def start_scatter(self, packed: Tensor) -> _comm.Finish:
        """See ``_comm.Carrier``."""
        if packed.numel() == 0:
            return lambda: torch.zeros_like(packed[0])
        return self._start(packed, launch_scatter)

    def start_gather(self, x: Tensor) -> _comm.Finish:
        """See ``_comm.Carrier``."""
        if x.numel() == 0:
            return lambda: x.new_empty(self.world, *x.shape)
        return self._start(x.contiguous(), launch_gather)

    def _start(self, x: Tensor, launch: Launch) -> _comm.Finish:
        caller = torch.cuda.current_stream(self.device)
        stream = caller if self.second is None else self.second
        if stream is not caller:
            stream.wait_stream(caller)
            x.record_stream(stream)
        with (
            torch.cuda.stream(stream),
            channel(self.op, self.group, self.device, CUDA_ROWS) as peers,
        ):
            y = launch(x, peers)
        if stream is caller:
            return lambda: y
        done = torch.cuda.Event()
        done.record(stream)

        def finish() -> Tensor:
            waiting = torch.cuda.current_stream(self.device)
            waiting.wait_event(done)
            y.record_stream(waiting)
            return y

        return finish


_second_streams: dict[int, torch.cuda.Stream] = {}


def carrier_of(
    op: str, group: str, device: torch.device, *, aside: bool = False
) -> SymmetricCarrier:
    """The carrier of a group that agreed to use symmetric memory and has the CUDA collectives.

    Args:
        op: whose channel.
        group: name of the group.
        device: the GPU.
        aside: on a second stream.
    """
    rank, world = _comm.place(group)
    second = None
    if aside:
        index = device.index or 0
        if index not in _second_streams:
            _second_streams[index] = torch.cuda.Stream(device)
        second, op = _second_streams[index], f"{op} on streams"
    return SymmetricCarrier(op, group, device, rank, world, second)


def reduce_scatter(x: Tensor, group: str, scatter_dim: int) -> Tensor:
    """The body of ``reduce_scatter`` on the CUDA key; arguments as there, checked before."""
    if not group:
        return x.clone(memory_format=torch.contiguous_format)
    carrier = carrier_of("reduce_scatter", group, x.device)
    return _comm.start_scatter_sum(x, carrier, scatter_dim)()


def all_gather(x: Tensor, group: str, gather_dim: int, gather_size: int | None) -> Tensor:
    """The body of ``all_gather`` on the CUDA key; arguments as there, checked before."""
    if not group:
        return x.clone(memory_format=torch.contiguous_format)
    carrier = carrier_of("all_gather", group, x.device)
    return _comm.start_gather(x, carrier, gather_dim, gather_size)()
