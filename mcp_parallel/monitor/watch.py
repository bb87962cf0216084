"""Holds the records of a run against the healthy ranges, step by step, on the rank that records.

No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mcp_parallel.config import Config
from mcp_parallel.monitor import ranges
from mcp_parallel.monitor.fields import VERDICTS
from mcp_parallel.monitor.stragglers import Stragglers
from mcp_parallel.monitor.verdicts import Finding
from mcp_parallel.monitor.windows import Window

if TYPE_CHECKING:
    from mcp_parallel.monitor.probe import Health
    from mcp_parallel.step import StepResult

_SAMPLED = (
    "gradient_vanishes",
    "update_too_large",
    "update_too_small",
    "variance_grows",
    "variance_collapses",
    "dead_units",
)
_ALWAYS = tuple(kind for kind in VERDICTS if kind not in (*_SAMPLED, "not_finite"))
# fp16's scale starts far up and comes down a step at a time.
_FIRST_STEPS = 50


class Watch:
    """What is looked for in the steps of a run.

    Args:
        config: the run.
        hosts: name of each rank's host.
    """

    def __init__(self, config: Config, hosts: Sequence[str]) -> None:
        self._train = config.train
        self._losses, self._norms = Window(), Window()
        self._clipped, self._skipped = Window(), Window()
        self._stragglers = Stragglers(config, hosts)
        self._num_seen = 0

    def look(
        self, step: int, result: StepResult, lr: float
    ) -> tuple[dict[str, Any], list[Finding]]:
        """Fields that follow from this step and those before, and what is out of its range.

        Args:
            step: steps done, this one included.
            result: of it.
            lr: its learning rate.
        """
        self._num_seen += 1
        findings: list[Finding | None] = []
        self._skipped.add(float(result.skipped))
        if self._num_seen > _FIRST_STEPS:
            findings.append(ranges.loss_scale_falls(self._skipped.mean))
        fields: dict[str, Any] = {}
        if result.is_finite:
            fields, found = self._look_at_norms(result)
            findings += found
        if result.own_s is not None and self._num_seen > 1:  # the first step makes buffers
            findings += self._stragglers.add(result.own_s)
        if result.health is not None:
            findings += _of_health(result.health, lr, step / self._train.steps)
        return fields, [finding for finding in findings if finding is not None]

    def _look_at_norms(self, result: StepResult) -> tuple[dict[str, Any], list[Finding | None]]:
        limit, norm = self._train.clip_norm, result.grad_norm
        z = self._losses.robust_z(result.loss)
        spike = ranges.loss_spike(result.loss, z, self._losses.median())
        self._losses.add(result.loss)
        self._norms.add(norm)
        findings = [
            spike,
            ranges.gradient_explodes(self._norms.recent_median(), self._norms.median()),
        ]
        self._clipped.add(float(0 < limit < norm))
        if self._clipped.is_full:
            findings.append(ranges.always_clipped(self._clipped.mean, self._norms.median(), limit))
        fields = {
            "grad_norm_clipped": min(norm, limit) if limit > 0 else norm,
            "clipped_share": self._clipped.mean,
        }
        return fields | ({} if z is None else {"loss_z": z}), findings


def kinds_looked_for(result: StepResult) -> tuple[str, ...]:
    """The verdicts that a step could have given."""
    return _ALWAYS if result.health is None else (*_ALWAYS, *_SAMPLED)


def _of_health(health: Health, lr: float, progress: float) -> list[Finding | None]:
    return [
        ranges.gradient_vanishes(health.grad_norm_per_million),
        ranges.update_too_large(health.update_ratio, progress),
        ranges.update_too_small(health.update_ratio, lr),
        ranges.variance_by_depth(health.activation_variance),
        ranges.dead_units(health.dead_share),
    ]
