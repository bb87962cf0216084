"""The embedding of tokens, in one number format or in a mixture of two.

Early in training the largest and noisiest gradients are the embedding's, and a frequent token's sum
of them is what 16 bits round worst or overflow on first. So a 16-bit run can begin with the
embedding computed in fp32:

    y = a y32 + (1 - a) y16        a = the fp32 share: 1, then falling to 0, by the step alone

y32 looks up the fp32 table and its gradient stays fp32; y16 looks up the rounded table and its
gradient is rounded to 16 bits. y is rounded to 16 bits where it enters the blocks. A head tied to
the table does the same with its loss (``parallel/head_loss.py``): there a is the weight of the loss
of logits that were computed in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mcp_kernels.nn import VocabParallelEmbedding
from mcp_kernels.nn._lookup import lookup


@dataclass
class Mixture:
    """How the next forwards mix fp32 and 16 bits."""

    dtype: torch.dtype
    """The 16-bit format."""
    fp32_share: float = 1.0
    """Weight of fp32, 0 to 1; what has no weight is not computed."""


def embed(table: nn.Embedding, tokens: Tensor) -> Tensor:
    """Rows of ``table`` ``[V, D]`` for int64 ``tokens`` ``[B, S]``: ``[B, S', D]``."""
    if isinstance(table, VocabParallelEmbedding):
        return table(tokens)
    return lookup(tokens, table.weight)


def embed_mixed(table: nn.Embedding, tokens: Tensor, mixture: Mixture) -> Tensor:
    """``embed`` with an fp32 ``table``, its result in the 16-bit format of ``mixture``."""
    share, dtype = mixture.fp32_share, mixture.dtype
    if share == 1:
        return embed(table, tokens).to(dtype)
    rounded = {"weight": table.weight.to(dtype)}
    narrow = (
        functional_call(table, rounded, (tokens,))
        if isinstance(table, VocabParallelEmbedding)
        else lookup(tokens, rounded["weight"])
    )
    if share == 0:
        return narrow
    wide = embed(table, tokens)
    return torch.lerp(narrow.to(wide.dtype), wide, share).to(dtype)
