"""Learning rate of a step: linear warm-up, then a cosine down to the minimum."""

from __future__ import annotations

import math

from mcp_parallel.config import TrainConfig


def learning_rate(step: int, train: TrainConfig) -> float:
    """Rate for 0-based ``step``; the first step already moves, the last one ends near ``min_lr``.

    Source: Loshchilov and Hutter, "SGDR" (2017), one cycle.
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    progress = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return train.min_lr + (train.lr - train.min_lr) * cosine
