"""Next-token loss of one rank that holds all logits."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy

IGNORED = -100
"""Target value of a position that has no next token; it counts in no loss."""


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum (not mean) over positions whose target is not ``IGNORED``.

    Args:
        logits: ``[B, S, V]``.
        targets: int64 ``[B, S]``.

    Returns:
        ``[]``, nats.
    """
    return cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
