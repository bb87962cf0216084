"""What the last steps say of this one: loss spikes, gradient norms, clipping, skipped steps.

No torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

# Steps looked back at: long enough for a median, short enough to follow a loss that falls.
WINDOW = 50
# Steps before the first judgement.
FEWEST = 16
# Steps that make a change and not a single event.
RECENT = 5
# Median absolute deviation times this estimates the standard deviation of a normal distribution.
_NORMAL = 1.4826
# The deviation counts as at least this part of the median: a loss that hardly moves would make a
# spike of its next breath.
_LEAST_DEVIATION = 0.01


class Window:
    """The last ``WINDOW`` values of something."""

    def __init__(self) -> None:
        self._values: deque[float] = deque()
        self._ordered: list[float] = []

    def add(self, value: float) -> None:
        """Take in the newest value; one that is not finite is left out."""
        if not math.isfinite(value):
            return
        if self.is_full:
            del self._ordered[bisect_left(self._ordered, self._values.popleft())]
        self._values.append(value)
        insort(self._ordered, value)

    @property
    def is_full(self) -> bool:
        """Whether there are ``WINDOW`` values."""
        return len(self._values) == WINDOW

    @property
    def mean(self) -> float:
        """Of the values; 0 without any."""
        return sum(self._values) / len(self._values) if self._values else 0.0

    def median(self) -> float | None:
        """Of the values; None with fewer than ``FEWEST``."""
        return _middle(self._ordered) if len(self._values) >= FEWEST else None

    def recent_median(self) -> float | None:
        """Of the newest ``RECENT`` values; None where there are hardly any before them."""
        if len(self._values) < FEWEST:
            return None
        return _middle(sorted(self._values[-place] for place in range(1, RECENT + 1)))

    def robust_z(self, value: float) -> float | None:
        """How many deviations ``value`` lies above the median; None with fewer than ``FEWEST``.

        The deviation is 1.4826 times the median distance from the median, which a few outliers do
        not move (Rousseeuw and Croux, "Alternatives to the Median Absolute Deviation", 1993).
        """
        middle = self.median()
        if middle is None or not math.isfinite(value):
            return None
        spread = _NORMAL * _middle(sorted([abs(one - middle) for one in self._values]))
        return (value - middle) / max(spread, _LEAST_DEVIATION * abs(middle), 1e-12)


def _middle(ordered: Sequence[float]) -> float:
    """The median of values in their order."""
    half, is_odd = divmod(len(ordered), 2)
    return ordered[half] if is_odd else (ordered[half - 1] + ordered[half]) / 2
