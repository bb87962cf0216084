"""Compare a case with its one-process run and judge it by the stated tolerances."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from mcp_parallel.parity.measure import Measurement


@dataclass(frozen=True)
class Tolerance:
    """Largest difference that passes; None where a figure is reported but not judged."""

    loss: float
    """Absolute, nats a token."""
    grad_norm: float
    """Relative."""
    update: float | None
    """Largest over parameters of max |difference| / max |update|."""


# fp64: rounding alone is 1e-16 times a modest condition number, so 1e-10 leaves no room for any
# real difference. fp32: sums in another order move the loss by a few units in the last place of
# ln(256) = 5.5 (4.8e-7 each). Updates are not judged in fp32: Adam divides by the gradient's own
# size, so an element whose gradient is rounding noise moves by a full step either way.
# In 16 bits every value is rounded by up to u, 2^-9 of it for bf16 and 2^-11 for fp16, in an order
# that depends on the layout. Losses and norms are means over thousands of such errors, so they stay
# below one of them; 2.5 u leaves room and is 10 times what was seen.
TOLERANCE = {
    "fp64": Tolerance(loss=1e-10, grad_norm=1e-10, update=1e-10),
    "fp32": Tolerance(loss=2e-6, grad_norm=1e-5, update=None),
    "bf16": Tolerance(loss=5e-3, grad_norm=5e-3, update=None),
    "fp16": Tolerance(loss=1.2e-3, grad_norm=1.2e-3, update=None),
}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    case: str
    precision: str
    loss_diff: float
    grad_norm_diff: float
    update_diff: float
    worst_parameter: str
    passed: bool
    same_loss_scales: bool = True

    def to_mapping(self) -> dict[str, object]:
        """Plain values for JSON."""
        return asdict(self)


def _largest(differences: Iterable[float]) -> float:
    """The largest value; infinite when one is NaN, which ``max`` would let pass."""
    values = list(differences)
    return math.inf if any(math.isnan(value) for value in values) else max(values)


def judge(case: str, precision: str, got: Measurement, reference: Measurement) -> Row:
    """Differences between a case and its reference."""
    losses = zip(got.losses, reference.losses, strict=True)
    norms = zip(got.grad_norms, reference.grad_norms, strict=True)
    updates = {
        name: _largest([((got.updates[name] - want).abs().max() / want.abs().max()).item()])
        for name, want in reference.updates.items()
    }
    worst = max(updates, key=lambda name: updates[name])
    loss = _largest(abs(a - b) for a, b in losses)
    # Infinite on both sides in a step that both skipped.
    norm = _largest(0.0 if a == b else abs(a - b) / b for a, b in norms)
    same_scales = None in reference.loss_scales or got.loss_scales == reference.loss_scales
    limit = TOLERANCE[precision]
    passed = (
        same_scales
        and loss <= limit.loss
        and norm <= limit.grad_norm
        and (limit.update is None or updates[worst] <= limit.update)
    )
    return Row(case, precision, loss, norm, updates[worst], worst, passed, same_scales)
