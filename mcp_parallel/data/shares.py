"""``data.mixture`` as shares and sources, and the shares that sum to 1. No torch, no numpy.

    0.7 web/tokens.bin, 0.3 s3://bucket/code/tokens.bin

A share is a multiple of 0.0001, so the order in which sources come repeats after at most 10,000
samples and is counted exactly.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

UNITS = 10_000
"""Parts that a whole is cut into."""
EXAMPLE = "0.7 web/tokens.bin, 0.3 code/tokens.bin"

_ITEM = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s+(\S.*)\Z")
# A path may hold a comma; what begins the next source is a comma and a number.
_BETWEEN = re.compile(r"\s*,\s*(?=[\d.]+\s)")


@dataclass(frozen=True)
class Share:
    """One source of a mixture."""

    share: Fraction
    path: str

    @property
    def text(self) -> str:
        """The share as a decimal number."""
        return f"{float(self.share):.12g}"


def parse_mixture(text: str) -> list[Share] | None:
    """The sources in order, whatever their shares; None of what is no mixture."""
    found = []
    for item in _BETWEEN.split(text.strip()):
        match = _ITEM.match(item.strip())
        if match is None:
            return None
        found.append(Share(Fraction(match[1]), match[2].strip()))
    return found


def units_of(shares: Sequence[Share]) -> list[int]:
    """Shares in units of 1 / ``UNITS``.

    Raises:
        ValueError: one is not a multiple of it, is none, or they do not sum to 1.
    """
    units = [share.share * UNITS for share in shares]
    if sum(units) != UNITS or any(unit.denominator != 1 or unit <= 0 for unit in units):
        raise ValueError("shares must be positive multiples of 0.0001 that sum to 1")
    return [unit.numerator for unit in units]


def normalised(shares: Sequence[Share]) -> list[Share] | None:
    """The nearest shares that ``units_of`` takes; None where a share is 0 or too small for it."""
    total = sum(share.share for share in shares)
    if not 0 < len(shares) <= UNITS or any(share.share <= 0 for share in shares):
        return None
    exact = [share.share / total * UNITS for share in shares]
    units = [max(1, int(unit)) for unit in exact]
    # Largest remainder: what rounding down has left goes to those that lost most.
    by_loss = sorted(range(len(units)), key=lambda i: units[i] - exact[i])
    left = UNITS - sum(units)
    if left < 0:
        return None
    for index in by_loss[:left]:
        units[index] += 1
    return [Share(Fraction(u, UNITS), s.path) for u, s in zip(units, shares, strict=True)]


def written(shares: Sequence[Share]) -> str:
    """The text that ``parse_mixture`` reads."""
    return ", ".join(f"{share.text} {share.path}" for share in shares)
