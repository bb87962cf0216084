"""The embedding of tokens."""

from __future__ import annotations

from torch import Tensor, nn

from mcp_kernels.nn import VocabParallelEmbedding
from mcp_kernels.nn._lookup import lookup


def embed(table: nn.Embedding, tokens: Tensor) -> Tensor:
    """Rows of ``table`` ``[V, D]`` for int64 ``tokens`` ``[B, S]``: ``[B, S', D]``."""
    if isinstance(table, VocabParallelEmbedding):
        return table(tokens)
    return lookup(tokens, table.weight)
