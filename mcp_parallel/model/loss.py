"""Cross-entropy of one rank that holds all logits."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy

IGNORED = -100
"""Target value of a position that has no target; it counts in no loss."""


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum (not mean) over positions whose target is not ``IGNORED``.

    Args:
        logits: ``[..., V]``, of tokens or of whole samples; the loss of 16-bit ones is computed
            in fp32.
        targets: int64 ``[...]``.

    Returns:
        ``[]``, nats.
    """
    if logits.itemsize < 4:
        logits = logits.float()
    return cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
