"""Rules of 1-bit Adam: what it can share out, and when it may switch. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from mcp_parallel.config import Config
from mcp_parallel.errors import shown
from mcp_parallel.rules.problem import Problem


def onebit_problems(config: Config) -> Iterator[Problem]:
    """What does not go with ``train.optimizer = onebit_adam``."""
    train, parallel = config.train, config.parallel
    if train.optimizer != "onebit_adam":
        return
    if parallel.zero > 1:
        yield Problem(
            "onebit_adam zero",
            "parallel.zero",
            "be 0 or 1 with optimizer onebit_adam (each dp rank needs its whole gradient, momentum "
            "and error)",
            shown(parallel.zero),
            ({"parallel.zero": 1}, {"parallel.zero": 0}, {"train.optimizer": "adamw"}),
        )
    if config.memory.offload:
        yield Problem(
            "onebit_adam offload",
            "memory.offload",
            "be false with optimizer onebit_adam (its errors and codes are buffers of its own, "
            "which every send reads and writes: there is no tier below for them)",
            "true",
            ({"memory.offload": False}, {"train.optimizer": "adamw"}),
        )
    freeze = train.freeze_step
    if train.precision == "fp64" and (freeze is None or freeze <= train.steps):
        yield Problem(
            "onebit_adam precision",
            "train.precision",
            "be fp32 when onebit_adam is to switch within train.steps (codes carry float32)",
            train.precision,
            ({"train.precision": "fp32"}, {"train.freeze_step": train.steps + 1}),
        )
    if freeze is not None and freeze < max(1, train.warmup_steps):
        least = max(1, train.warmup_steps)
        yield Problem(
            "onebit_adam freeze_step",
            "train.freeze_step",
            f"be null (watch the variance) or at least {least}, the end of the warm-up",
            shown(freeze),
            ({"train.freeze_step": least}, {"train.freeze_step": None}),
        )
