"""One global gradient norm that counts each element once, whatever the layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mcp_parallel.parallel.shards import Shard

# As in torch.nn.utils.clip_grads_with_norm_, so that a zero norm divides nothing by zero.
EPSILON = 1e-6


def local_square_sum(shards: Sequence[Shard]) -> Tensor:
    """This rank's share of the squared norm, float64 ``[]``: summed over all ranks it is the norm.

    Replicas are counted on one rank alone (``Shard.counted_here``). Norms of single tensors are
    taken in the gradient's dtype, their squares summed in float64.
    """
    grads = [
        grad
        for shard in shards
        if shard.counted_here and (grad := shard.local_grad) is not None and grad.numel()
    ]
    if not grads:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(grads)).double().square().sum().cpu()


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients are multiplied with so that their norm is at most ``max_norm``; 0 is off."""
    return min(1.0, max_norm / (norm + EPSILON)) if max_norm > 0 else 1.0
