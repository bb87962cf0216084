"""``fully_shard``'s collectives as spans of communication, so that its waits are told from work.

torch waits inside of its own code: without this the peers of a slow rank under ZeRO, over any
backend but shared memory, would seem to work as long as it does.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from mcp_kernels.spans import communicates, communication


def see_waits(module: FSDPModule) -> None:
    """Put ``module``'s gathering of weights and sums of gradients into spans, on ranks of CPUs."""
    module.set_custom_all_gather(_SeenAllGather())
    module.set_custom_reduce_scatter(SeenReduceScatter())


class _SeenAllGather(DefaultAllGather):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        with communication("gather of weights"):
            work = super().__call__(output_tensor, input_tensor, group, async_op)
        return None if work is None else _SeenWork(work)


class SeenReduceScatter(DefaultReduceScatter):
    """What ``fully_shard`` calls to sum the gradients of one module."""

    @communicates("sum of a block's gradients")
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work:
        """Start the sum, and wait for it unless ``async_op``."""
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


class _SeenWork(dist.Work):
    """A collective under way; to wait for it is a span."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with communication("wait for weights"):
            return self._work.wait(timeout)

    def is_completed(self) -> bool:
        return self._work.is_completed()
