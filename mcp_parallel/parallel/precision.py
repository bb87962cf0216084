"""Number formats of a run: what the model computes in, and what its weights are kept in.

In 16 bits every weight exists twice: the fp32 value that the optimizer moves, and the value rounded
from it that forward and backward use. Under ``fully_shard`` the fp32 values are the shards, and the
gathered copy is the 16-bit one; elsewhere the model's parameters are the 16-bit copies and the
shard records hold the fp32 values (``Shard.master``). Either way there are two copies and no third.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcp_parallel.config import Config

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class Precision:
    """Formats of one run."""

    compute: torch.dtype
    """Activations, their gradients, and the weights that they meet."""

    @classmethod
    def of(cls, config: Config) -> Precision:
        """The formats of ``config.train.precision``."""
        return cls(DTYPES[config.train.precision])

    @property
    def state(self) -> torch.dtype:
        """Weights as they are kept, gradient sums, moments and the loss."""
        return torch.float32 if self.is_narrow else self.compute

    @property
    def is_narrow(self) -> bool:
        """Whether the model computes in 16 bits."""
        return self.compute.itemsize == 2
