"""DDP's communication hook for OneBitAdam: averages in stage 1, keeps out of the way in stage 2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from mcp_kernels.optim.onebit_adam import OneBitAdam


def attach(optimizer: OneBitAdam, ddp: DistributedDataParallel) -> None:
    """Register the hook; see ``OneBitAdam.attach``."""
    theirs = dist.get_process_group_ranks(ddp.process_group)
    ours = [dist.get_rank()]
    if optimizer.group is not None:
        ours = dist.get_process_group_ranks(optimizer.group)
    if theirs != ours:
        raise ValueError(
            f"OneBitAdam.attach: ddp must average over the ranks of group {ours}, got {theirs}; "
            "give both the same process group"
        )
    optimizer.grads = "averaged"
    compressed = {
        id(param)
        for group in optimizer.param_groups
        if group["compress"]
        for param in group["params"]
    }
    ddp.register_comm_hook(_Hook(optimizer, compressed), _hook)


class _Hook:
    """What the hook needs to know."""

    def __init__(self, optimizer: OneBitAdam, compressed: set[int]) -> None:
        self.optimizer = optimizer
        self.compressed = compressed


def _hook(state: _Hook, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    optimizer, buffer = state.optimizer, bucket.buffer()
    group = optimizer.group
    if group is None:
        return _done(buffer)
    if not optimizer.is_compressing:
        return _mean(buffer, group, buffer)
    pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
    plain = [grad for param, grad in pairs if id(param) not in state.compressed]
    if not plain:
        return _done(buffer)
    flat = torch.cat([grad.reshape(-1) for grad in plain])
    return _mean(flat, group, buffer, plain)


# DDP looks at the annotations themselves, which the import at the top made strings.
_hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}


def _mean(
    flat: Tensor, group: dist.ProcessGroup, buffer: Tensor, copies: list[Tensor] | None = None
) -> torch.futures.Future[Tensor]:
    """A future of ``buffer`` once ``flat`` is the mean over ranks, copied out where asked."""
    flat.div_(group.size())
    work = group.allreduce([flat], dist.AllreduceOptions())

    def finish(_: Any) -> Tensor:
        if copies is not None:
            parts = flat.split([grad.numel() for grad in copies])
            for grad, part in zip(copies, parts, strict=True):
                grad.copy_(part.view_as(grad))
        return buffer

    return work.get_future().then(finish)


def _done(buffer: Tensor) -> torch.futures.Future[Tensor]:
    devices: list[int | str | torch.device] | None = [buffer.device] if buffer.is_cuda else None
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    future.set_result(buffer)
    return future
