"""What ops have in common under ``torch.vmap``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Result = tuple[Any, Any]
"""(outputs, their mapped dimensions), as ``torch.library.register_vmap`` takes it."""


def in_front(tensor: Tensor, dim: int | None, num_samples: int) -> Tensor:
    """``tensor`` with the mapped dimension first; one that all samples share is expanded."""
    if dim is None:
        return tensor.expand(num_samples, *tensor.shape)
    return tensor.movedim(dim, 0)


def loop(
    op: Callable[..., Any], info: Any, in_dims: Sequence[int | None], args: Sequence[Any]
) -> Result:
    """Sample by sample, for a call whose samples do not go into one."""
    results = []
    for index in range(info.batch_size):
        sample = [
            arg if dim is None else arg.select(dim, index)
            for arg, dim in zip(args, in_dims, strict=True)
        ]
        result = op(*sample)
        results.append(result if isinstance(result, tuple) else (result,))
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    if len(stacked) == 1:
        return stacked[0], 0
    return stacked, (0,) * len(stacked)
