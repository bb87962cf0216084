"""Which source of a mixture each sample comes from: a pure function of (shares, seed, position).

Tijdeman's rule keeps the number of samples taken from every source within one of its share, at
every position: of the sources that are owed enough, the one goes next that has the least time left
until it is owed a whole sample too many. Shares are whole numbers of units, so the order repeats
after at most as many samples as there are units; one period of it is a table.

Source: R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray


class Blend:
    """The order of a mixture's sources.

    Args:
        units: share of each source, positive whole numbers.
        seed: ``data.seed``; of sources that are due alike it says which one comes first.

    Cost: building takes the sum of units, over their common divisor, times the number of sources.
    """

    def __init__(self, units: Sequence[int], seed: int) -> None:
        divisor = gcd(*units)
        self._shares = np.array([unit // divisor for unit in units], dtype=np.int64)
        self._source = _period(self._shares.tolist(), _ranking(len(units), seed))
        self._before = np.zeros(len(self._source), dtype=np.int64)
        for source in range(len(units)):
            places = np.nonzero(self._source == source)[0]
            self._before[places] = np.arange(len(places))

    def at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """What comes at each position of the run.

        Returns:
            ``(source [N], number [N])``: the sample is the ``number``-th one of its source.
        """
        period, place = np.divmod(positions, len(self._source))
        source = self._source[place]
        return source, period * self._shares[source] + self._before[place]


def source_seed(seed: int, source: int) -> int:
    """The seed of a source's own order; that of the first is ``seed``, as without a mixture."""
    if source == 0:
        return seed
    return int.from_bytes(_hashed(seed, source)[:8], "big") >> 1


def _ranking(count: int, seed: int) -> list[int]:
    """The sources by a hash, which decides between those that are due alike."""
    return sorted(range(count), key=lambda source: _hashed(seed, source))


def _hashed(seed: int, source: int) -> bytes:
    return hashlib.sha256(f"{seed} {source}".encode()).digest()


def _period(shares: list[int], ranking: list[int]) -> NDArray[np.int64]:
    """The source at each place of one period.

    With k sources, W units in all and n samples taken, this one included, source i is owed
    ``n w_i / W - taken_i``. It may come once that is at least 1 / (2k - 2), and must come before it
    exceeds 1 - 1 / (2k - 2). Below, both are multiplied by (2k - 2) W.
    """
    total, scale = sum(shares), 2 * len(shares) - 2
    if scale == 0:
        return np.zeros(total, dtype=np.int64)
    # Times until a source must come are compared over a common denominator, exactly.
    factors = [lcm(*shares) // share for share in shares]
    owed = [0] * len(shares)
    order = np.empty(total, dtype=np.int64)
    for place in range(total):
        for source, share in enumerate(shares):
            owed[source] += scale * share
        ready = [source for source in ranking if owed[source] >= total]
        limit = (scale - 1) * total
        chosen = min(ready, key=lambda source: (limit - owed[source]) * factors[source])
        owed[chosen] -= scale * total
        order[place] = chosen
    return order
