"""The layouts that run nearest to one that does not. No torch.

The distance of two layouts is the number of doublings and halvings between them: of dp, tp, pp, cp,
dp_replicate, the virtual stages and the micro-batch, each on its own, and one for another schedule
and for another ZeRO stage. Layouts on the configured number of ranks come before all others,
whatever their distance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from mcp_parallel.config import Config
from mcp_parallel.layout import Layout
from mcp_parallel.rules import balance, batch, layout, optimizer, zero
from mcp_parallel.rules.problem import MAX_WAYS, Problem, divisors, nearest

Legal = Callable[[Config], bool]
Change = dict[str, Any]

# Degrees tried on one number of ranks, and numbers of ranks below and above the configured one.
# Three are found among the first few where there are any; a million ranks are 231 ways to be three
# degrees, and a highly composite number ten times as many.
_TRIED_DEGREES = 400
_NEIGHBOURS = 8
_TRIED_MICRO_BATCHES = 6


# Keys that may hold a number for each rank or stage; where they do, another layout drops them.
_LISTS = ("stage_split", "dp_shares")


class _Degrees(NamedTuple):
    dp: int
    tp: int
    pp: int
    cp: int


def nearest_layouts(config: Config, world_size: int | None, legal: Legal) -> list[Change]:
    """Up to three layouts for a config that its layout keeps from running, nearest first.

    Args:
        config: has numbers in range.
        world_size: ranks there must be; None keeps the configured number where that can be done.
        legal: the judge: whether a config can run. Every layout has passed it.

    Returns:
        Changes of ``parallel`` and ``train.micro_batch_size``, each with all degrees that are not 1
        on either side: ``{"parallel.dp": 2, "parallel.tp": 2, "parallel.pp": 1}``.

    Cost: milliseconds, at most a tenth of a second.
    """
    ranks = world_size or Layout.from_config(config.parallel).world_size
    found = list(islice(_on(config, ranks, legal), MAX_WAYS))
    if world_size is None:
        for other in _worlds_near(ranks):
            found += islice(_on(config, other, legal), MAX_WAYS - len(found))
    return [_as_change(config, suited) for suited in found]


def _worlds_near(ranks: int) -> list[int]:
    """Other numbers of ranks, nearest first: neighbours, and what doubling and halving gives."""
    near = set(range(max(1, ranks - _NEIGHBOURS), ranks + _NEIGHBOURS + 1))
    near |= {2 * ranks, *(max(1, ranks >> halvings) for halvings in range(1, 21))}
    return nearest(near - {ranks}, ranks)


def _on(config: Config, ranks: int, legal: Legal) -> Iterator[Config]:
    """Legal layouts on so many ranks, nearest first, one for each choice of degrees."""
    waiting: list[tuple[float, Config]] = []  # found, but a nearer one may come
    for degrees in _degrees_of(config, ranks):
        least = _degree_distance(config, degrees)
        waiting.sort(key=lambda pair: pair[0])
        while waiting and waiting[0][0] <= least:
            yield waiting.pop(0)[1]
        suited = _suited(config, degrees, legal)
        if suited is not None:
            waiting.append((_distance(config, suited), suited))
    yield from (suited for _, suited in sorted(waiting, key=lambda pair: pair[0]))


def _degrees_of(config: Config, ranks: int) -> list[_Degrees]:
    """Every way to share ``ranks`` out, nearest first; cp is proposed to who already uses it."""
    every = (
        _Degrees(ranks // (tp * pp * cp), tp, pp, cp)
        for cp in (divisors(ranks) if config.parallel.cp > 1 else [1])
        for tp in divisors(ranks // cp)
        for pp in divisors(ranks // (cp * tp))
    )
    return sorted(every, key=lambda d: _degree_distance(config, d))[:_TRIED_DEGREES]


def _suited(config: Config, degrees: _Degrees, legal: Legal) -> Config | None:
    """``config`` with these degrees, and the nearest schedule, micro-batch and ZeRO with them."""
    start = replace(
        config,
        parallel=replace(balance.without_lists(config.parallel), **degrees._asdict()),
    )
    if next(layout.tensor_problems(start), None) is not None:
        return None
    for staged in _without(layout.stage_problems, _schedules(start)):
        for batched in _without(batch.batch_problems, _micro_batches(staged)):
            suited = _without(_zero_problems, _zero_choices(batched))
            found = next((choice for choice in suited if legal(choice)), None)
            if found is not None:
                return found
    return None


def _without(
    rule: Callable[[Config], Iterator[Problem]], choices: Iterable[Config]
) -> list[Config]:
    return [choice for choice in choices if next(rule(choice), None) is None]


def _schedules(config: Config) -> Iterator[Config]:
    parallel = config.parallel
    yield config
    counts = nearest(range(1, 5), parallel.virtual_stages)
    for schedule in dict.fromkeys((parallel.schedule, "1f1b", "gpipe")):
        for count in counts:
            yield replace(
                config, parallel=replace(parallel, schedule=schedule, virtual_stages=count)
            )


def _micro_batches(config: Config) -> Iterator[Config]:
    yield config
    share = config.train.global_batch_size // config.parallel.dp
    sizes = nearest(divisors(max(1, share)), config.train.micro_batch_size)
    for size in sizes[:_TRIED_MICRO_BATCHES]:
        yield replace(config, train=replace(config.train, micro_batch_size=size))


def _zero_choices(config: Config) -> Iterator[Config]:
    parallel = config.parallel
    yield config
    shared = math.gcd(parallel.dp, parallel.dp_replicate)
    for replicas in dict.fromkeys((parallel.dp_replicate, shared, 1)):
        for stage in dict.fromkeys((parallel.zero, 1, 0)):
            yield replace(config, parallel=replace(parallel, zero=stage, dp_replicate=replicas))


def _zero_problems(config: Config) -> Iterator[Problem]:
    yield from zero.replica_problems(config)
    yield from optimizer.onebit_problems(config)


def _degree_distance(config: Config, degrees: _Degrees) -> float:
    wanted = config.parallel
    pairs = zip(degrees, (wanted.dp, wanted.tp, wanted.pp, wanted.cp), strict=True)
    return sum(_doublings(new, old) for new, old in pairs)


def _distance(config: Config, other: Config) -> float:
    """The distance of the two layouts, as this file's head says."""
    new, old = other.parallel, config.parallel
    return (
        _degree_distance(config, _Degrees(new.dp, new.tp, new.pp, new.cp))
        + _doublings(new.dp_replicate, old.dp_replicate)
        + _doublings(new.virtual_stages, old.virtual_stages)
        + _doublings(other.train.micro_batch_size, config.train.micro_batch_size)
        + (new.schedule != old.schedule)
        + (new.zero != old.zero)
    )


def _doublings(new: int, old: int) -> float:
    return abs(math.log2(new / old))


def _as_change(config: Config, other: Config) -> Change:
    new, old = other.parallel, config.parallel
    change: Change = {f"parallel.{key}": getattr(new, key) for key in ("dp", "tp", "pp")}
    others = ("cp", "schedule", "virtual_stages", "zero", "dp_replicate", *_LISTS)
    for key in others:
        if getattr(new, key) != getattr(old, key) or (key == "cp" and new.cp > 1):
            change[f"parallel.{key}"] = getattr(new, key)
    if other.train.micro_batch_size != config.train.micro_batch_size:
        change["train.micro_batch_size"] = other.train.micro_batch_size
    return change
