"""Number formats of a run: what the model computes in, and what its weights are kept in.

In 16 bits every weight exists twice: the fp32 value that the optimizer moves, and the value rounded
from it that forward and backward use. Under ``fully_shard`` the fp32 values are the shards, and the
gathered copy is the 16-bit one; elsewhere the model's parameters are the 16-bit copies and the
shard records hold the fp32 values (``Shard.master``). Either way there are two copies and no third.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcp_parallel.config import Config, TrainConfig

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
    mixes_embedding: bool
    """The embedding is kept in fp32 alone and rounded when it is used (see ``fp32_share``)."""

    @classmethod
    def of(cls, config: Config) -> Precision:
        """The formats of ``config.train.precision``."""
        train, compute = config.train, DTYPES[config.train.precision]
        has_wide_steps = train.fp32_embedding_steps + train.fp32_embedding_switch_steps > 0
        return cls(compute, mixes_embedding=compute.itemsize == 2 and has_wide_steps)

    @property
    def state(self) -> torch.dtype:
        """Weights as they are kept, gradient sums, moments and the loss."""
        return torch.float32 if self.is_narrow else self.compute

    def rounds(self, name: str) -> bool:
        """Whether parameter ``name`` is a 16-bit copy where ``fully_shard`` gathers none."""
        return self.is_narrow and not (self.mixes_embedding and name == "embed")

    @property
    def is_narrow(self) -> bool:
        """Whether the model computes in 16 bits."""
        return self.compute.itemsize == 2


def fp32_share(step: int, train: TrainConfig) -> float:
    """Weight of fp32 in the embedding's output in the step after ``step`` steps, 1 to 0.

    1 for ``fp32_embedding_steps``, then on a line down to 0 over ``fp32_embedding_switch_steps``
    steps, none of which has 1 or 0.
    """
    into_switch = step - train.fp32_embedding_steps
    if into_switch < 0:
        return 1.0
    return max(0.0, 1 - (into_switch + 1) / (train.fp32_embedding_switch_steps + 1))
