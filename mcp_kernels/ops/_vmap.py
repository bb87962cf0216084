"""What ops have in common under ``torch.vmap``."""

from __future__ import annotations

from torch import Tensor

from mcp_kernels._transforms import Result, check_samples, loop

__all__ = ["Result", "check_samples", "in_front", "loop"]


def in_front(tensor: Tensor, dim: int | None, num_samples: int) -> Tensor:
    """``tensor`` with the mapped dimension first; one that all samples share is expanded."""
    if dim is None:
        return tensor.expand(num_samples, *tensor.shape)
    return tensor.movedim(dim, 0)
