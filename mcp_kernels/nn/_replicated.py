"""Between features that ranks share out and features that each holds in full.

Both ends count a replicated value once (see ``ops/collectives.py``): its gradient is the same on
all ranks, so gathering's gradient is a slice and slicing's gradient is a gather. The public
``all_gather`` is the other kind, whose result each rank uses in its own way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcp_kernels.ops.collectives import all_gather


def gather_features(x: Tensor, group: ProcessGroup, size: int) -> Tensor:
    """``[..., n]`` of each rank joined to ``[..., size]`` on all; cut as ``torch.chunk`` cuts."""
    return _Gather.apply(x, group, size)  # pyright: ignore[reportReturnType]


def split_features(x: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's ``[..., n]`` of the replicated ``[..., size]``; the other way round."""
    return _Split.apply(x, group)  # pyright: ignore[reportReturnType]


def _mine(x: Tensor, group: ProcessGroup) -> Tensor:
    size, world, rank = x.shape[-1], group.size(), group.rank()
    step = -(-size // world)
    start = min(rank * step, size)
    return x.narrow(-1, start, min(step, size - start)).contiguous()


class _Gather(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, group: ProcessGroup, size: int) -> Tensor:
        return all_gather(x, group=group, gather_dim=-1, gather_size=size)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.group, _ = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _Split.apply(grads[0], ctx.group), None, None


class _Split(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, group: ProcessGroup) -> Tensor:
        return _mine(x, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.group = inputs
        ctx.size = x.shape[-1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _Gather.apply(grads[0], ctx.group, ctx.size), None
