"""A broken rule with its ways out, and the small arithmetic that finds them. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

from mcp_parallel.errors import joined, spelled

MAX_WAYS = 3
"""A message names the nearest few choices, not all of them."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One rule that a configuration breaks."""

    name: str
    """Stable name of the rule."""
    key: str
    """``table.key`` that breaks it."""
    rule: str
    """What the key must do or be, in words that follow "must"."""
    got: str
    """The value, as shown."""
    ways: tuple[Mapping[str, Any], ...]
    """Changes, each of which mends this problem alone: ``{"parallel.tp": 4}``."""

    def __str__(self) -> str:
        return f"check: {self.key} must {self.rule}, got {self.got}; use {_in_words(self.ways)}"


def _in_words(ways: tuple[Mapping[str, Any], ...]) -> str:
    groups: list[str] = []
    for keys, members in groupby(ways, key=tuple):
        if len(keys) == 1:
            groups.append(f"{keys[0]} = {joined(_plain(way[keys[0]]) for way in members)}")
        else:
            groups += [
                joined((f"{key} = {_plain(value)}" for key, value in way.items()), "and")
                for way in members
            ]
    return ", or ".join(groups)


def _plain(value: Any) -> str:
    text = spelled(value)
    return text[1:-1] if isinstance(value, str) and " " not in value else text


def ways(key: str, values: Iterable[Any], limit: int = MAX_WAYS) -> tuple[dict[str, Any], ...]:
    """The first ``limit`` values, each as a change of ``key``."""
    return tuple({key: value} for value in islice(values, limit))


def divisors(number: int) -> list[int]:
    """All divisors in rising order. Cost: sqrt(number)."""
    small = [part for part in range(1, math.isqrt(number) + 1) if number % part == 0]
    return small + [number // part for part in reversed(small) if part * part != number]


def nearest(values: Iterable[int], target: int) -> list[int]:
    """``values`` ordered by ratio to ``target``, the smaller first among equals."""
    return sorted(values, key=lambda value: (abs(math.log(value / target)), value))


def nearest_multiples(unit: int, target: int, low: int, high: int) -> list[int]:
    """Multiples of ``unit`` in ``[low, high]`` around ``target``, nearest first, at most four."""
    first, last = max(1, -(-low // unit)), high // unit
    middle = min(max(target // unit, first), last)
    factors = {middle - 1, middle, middle + 1, middle + 2}
    multiples = (factor * unit for factor in factors if first <= factor <= last)
    return sorted(multiples, key=lambda value: (abs(value - target), value))
