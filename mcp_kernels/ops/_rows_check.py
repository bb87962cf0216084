"""Checks that ops over rows of features share, in the words of each op."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def compute_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64, float32 for all else."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def check_floating(op: str, name: str, x: Tensor) -> None:
    """Raise unless ``x`` is of a type that the bodies take.

    Raises:
        TypeError: it is not.
    """
    if x.dtype not in DTYPES:
        raise TypeError(
            f"{op}: {name} must be float64, float32, bfloat16 or float16, got {x.dtype}"
        )


def check_like(op: str, name: str, tensor: Tensor, like: str, other: Tensor) -> None:
    """Raise unless two tensors have one shape, dtype and device.

    Raises:
        ValueError: they differ.
    """
    if (tensor.shape, tensor.dtype, tensor.device) != (other.shape, other.dtype, other.device):
        raise ValueError(
            f"{op}: {name} must be {other.dtype}{list(other.shape)} on {other.device} as {like} "
            f"is, got {tensor.dtype}{list(tensor.shape)} on {tensor.device}"
        )
