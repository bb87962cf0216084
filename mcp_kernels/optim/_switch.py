"""When the second moment has settled: the end of stage 1.

Source: Tang et al. (2021), section 7.1, watch the variance and switch when it has become stable.
Their rule compares norms some steps apart; ours takes them bias-corrected and both ways, so that a
variance that still rises does not count as stable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mcp_kernels.optim._adam_bucket import AdamBucket

# Ratio of the smaller to the larger norm of the variance, one memory of it apart.
STABLE_RATIO = 0.96


class SwitchRule:
    """A fixed number of steps, or a variance that has stopped moving.

    "auto": every k = 1 / (1 - beta2) steps the 1-norm of the bias-corrected second moment is
    compared with that of k steps before; the rank votes to switch when their ratio is at least
    ``STABLE_RATIO`` in every bucket, and no learning rate rose in between.

    Args:
        freeze_step: steps of stage 1, or "auto".
        buckets: those that will be frozen.
    """

    def __init__(self, freeze_step: int | Literal["auto"], buckets: Sequence[AdamBucket]) -> None:
        self.freeze_step = freeze_step
        self._buckets = buckets
        self.norms: list[float] = []
        self.rates: list[float] = []
        self.vote = False

    @property
    def asks(self) -> bool:
        """Whether votes have to travel."""
        return self.freeze_step == "auto"

    @property
    def interval(self) -> int:
        """k, of the slowest bucket."""
        return max((round(1 / (1 - b.betas[1])) for b in self._buckets), default=1)

    def observe(self, count: int, options: Sequence[Mapping[str, Any]]) -> None:
        """Look at the variance after ``count`` steps."""
        if not self.asks or count % self.interval or any(b.is_frozen for b in self._buckets):
            return
        norms = [bucket.variance_norm(count) for bucket in self._buckets]
        rates = [float(group["lr"]) for group in options]
        if self.norms:
            pairs = zip(norms, self.norms, strict=True)
            # Two zeros (a chunk of padding alone) are stable.
            is_stable = all(min(a, b) >= STABLE_RATIO * max(a, b) for a, b in pairs)
            rose = any(now > before for now, before in zip(rates, self.rates, strict=True))
            self.vote = is_stable and not rose
        self.norms, self.rates = norms, rates

    def wants_switch(self, count: int, options: Sequence[Mapping[str, Any]]) -> bool:
        """This rank's vote on ending stage 1 with the step after ``count`` steps."""
        if isinstance(self.freeze_step, int):
            return count + 1 >= self.freeze_step
        return self.vote and all(
            float(group["lr"]) <= rate for group, rate in zip(options, self.rates, strict=True)
        )

    def is_due(self, count: int, votes_all: bool) -> bool:
        """Whether stage 1 ends after ``count`` steps."""
        if isinstance(self.freeze_step, int):
            return count >= self.freeze_step
        return votes_all
