"""A slow link between ranks of one host: shared memory, and a wait for what a wire would take.

Each rank has one link of ``BITS_PER_S``, full duplex; what it sends goes through one after the
other (a token bucket with room for nothing). A call returns at once and is complete when its bytes
are through, so communication overlaps with computation as on a network card. Bytes are those of
bandwidth-optimal algorithms: a ring for the all-reduce.
"""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist

from mcp_kernels.shm import ShmProcessGroup
from mcp_kernels.shm.work import DoneWork
from mcp_kernels.spans import communicates

BITS_PER_S = 1e9


class _TimedWork(DoneWork):
    """Done when its bytes are through the link."""

    def __init__(self, tensors, due):
        super().__init__(tensors)
        self._due = due
        self._future = None

    @communicates("wait for the link")
    def wait(self, timeout=None):
        remaining = self._due - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)
        return True

    def is_completed(self):
        return time.perf_counter() >= self._due

    def get_future(self):
        if self._future is None:
            self._future = torch.futures.Future()
            # A thread of its own: what waits for it may itself run when another one completes.
            delay = max(0.0, self._due - time.perf_counter())
            timer = threading.Timer(delay, self._future.set_result, [list(self._tensors)])
            timer.daemon = True
            timer.start()
        return self._future


class ThrottledGroup(ShmProcessGroup):
    """The group behind backend "throttled"."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.bytes_sent = 0
        self.bits_per_s = BITS_PER_S
        self.direct = None  # nobody goes round the link
        self._free_at = 0.0

    def name(self):
        """Not shm's: what it carries is not there when a call returns."""
        return "throttled"

    def _send(self, num_bytes, tensors):
        self.bytes_sent += num_bytes
        self._free_at = max(self._free_at, time.perf_counter()) + 8 * num_bytes / self.bits_per_s
        return _TimedWork(tensors, self._free_at)

    def allreduce(self, tensors, opts=dist.ReduceOp.SUM):
        super().allreduce(tensors, opts)
        tensors = tensors if isinstance(tensors, list) else [tensors]
        peers = self.size() - 1
        return self._send(2 * peers * sum(t.nbytes for t in tensors) // self.size(), tensors)

    def alltoall_base(self, output, packed, output_sizes, input_sizes, opts=None):
        super().alltoall_base(output, packed, output_sizes, input_sizes, opts)
        return self._send(packed.nbytes * (self.size() - 1) // self.size(), [output])

    def _allgather_base(self, packed, x, opts=None):
        super()._allgather_base(packed, x, opts)
        return self._send(x.nbytes * (self.size() - 1), [packed])

    def _reduce_scatter_base(self, output, packed, opts=dist.ReduceOp.SUM):
        super()._reduce_scatter_base(output, packed, opts)
        return self._send(packed.nbytes * (self.size() - 1) // self.size(), [output])

    all_to_all_single = alltoall_base
    reduce_scatter_single = _reduce_scatter_base
    all_gather_single = _allgather_base


def _create(arguments, options):
    return ThrottledGroup(
        arguments.store,
        arguments.group_rank,
        arguments.group_size,
        arguments.timeout,
        name=arguments.group_id,
    )


def throttled_group(world):
    """A group of the first ``world`` ranks over slow links; collective."""
    if not hasattr(dist.Backend, "THROTTLED"):
        dist.Backend.register_backend("throttled", _create, extended_api=True, devices=["cpu"])
    return dist.new_group(list(range(world)), backend="throttled")
