"""What a model asks of tensor parallelism: five operations, here for a rank that holds it all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, linear

IGNORED = -100
"""Target value of a position that has no next token; it counts in no loss."""


class Region(Protocol):
    """Entry to and exit from the part of a layer whose weights are split over ranks."""

    def enter(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """Column-parallel: ``x @ w.T`` for each ``[out, in]``; ``[B, S', D] -> [B, S, out]``."""
        ...

    def leave(self, x: Tensor, weight: Tensor) -> Tensor:
        """Row-parallel: the sum over ranks of ``x @ weight.T``; ``[B, S, in] -> [B, S', D]``."""
        ...

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Rows of ``table`` for ``tokens``; int64 ``[B, S] -> [B, S', D]``."""
        ...

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sum (not mean) over positions whose target is not ``IGNORED``; ``[B, S, V] -> []``."""
        ...


class WholeRegion:
    """Every weight is whole and here: no communication."""

    def enter(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """See ``Region.enter``."""
        return [linear(x, weight) for weight in weights]

    def leave(self, x: Tensor, weight: Tensor) -> Tensor:
        """See ``Region.leave``."""
        return linear(x, weight)

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        """See ``Region.embed``."""
        return embedding(tokens, table)

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """See ``Region.cross_entropy``."""
        return cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
