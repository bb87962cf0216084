"""Dynamic loss scaling: gradients too small for fp16 are computed times a scale and brought back.

The loss is multiplied by the scale before backward; the factor that clips gradients divides by it.
A step whose gradients overflow is skipped and halves the scale, some steps in a row without one
double it (Micikevicius et al., "Mixed Precision Training", 2018, section 3.2). Whether a step
overflowed is read from the sums that all ranks share, so all take the same decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcp_parallel.checkpoint.manifest import Manifest
from mcp_parallel.config import Config

GROWTH = 2.0
BACKOFF = 0.5
# Below it gradients overflow though nothing makes them larger than they are.
FLOOR = 1.0
_KEY = "loss_scaler"


class LossScaler:
    """The scale of one run; one and constant where scaling is off.

    Args:
        config: the run.
    """

    def __init__(self, config: Config) -> None:
        scaler = config.amp.grad_scaler
        is_fp16 = config.train.precision == "fp16"
        self.is_on = is_fp16 if scaler.enabled is None else scaler.enabled
        self.scale = scaler.init_scale if self.is_on else 1.0
        """Of the next step's loss; divided by ``BACKOFF`` it is that of the step before, after one
        that overflowed."""
        self.num_skipped = 0
        """Steps so far that updated nothing."""
        self._growth_interval = scaler.growth_interval
        self._num_good = 0

    def update(self, *, overflowed: bool) -> bool:
        """Take in whether a step's loss or gradient was not finite; True says to skip it and go on.

        An overflow that finds no room below the scale, or scaling off, is not forgiven.
        """
        if not self.is_on:
            return False
        if not overflowed:
            self._num_good += 1
            if self._num_good == self._growth_interval:
                self.scale, self._num_good = self.scale * GROWTH, 0
            return False
        self.scale, self._num_good = self.scale * BACKOFF, 0
        if self.scale < FLOOR:
            return False
        self.num_skipped += 1
        return True

    def extra(self) -> dict[str, Any]:
        """What goes into a checkpoint's manifest."""
        state = {"scale": self.scale, "num_good": self._num_good} if self.is_on else {}
        return {_KEY: {**state, "num_skipped": self.num_skipped}}

    def load(self, extra: Mapping[str, Any]) -> None:
        """Go on as the run that saved ``extra``; a scale that it did not have starts anew."""
        saved = extra.get(_KEY) or {}
        self.num_skipped = saved.get("num_skipped", 0)
        if self.is_on and "scale" in saved:
            self.scale, self._num_good = saved["scale"], saved["num_good"]


def updates_in(manifest: Manifest) -> int:
    """Optimizer updates that a checkpoint holds: its steps but for those that were skipped."""
    return manifest.step - (manifest.extra.get(_KEY) or {}).get("num_skipped", 0)
