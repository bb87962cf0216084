"""Rules between the model's shape and the degrees it is split by. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from mcp_parallel.config import Config
from mcp_parallel.layout import Layout
from mcp_parallel.rules.balance import without_lists
from mcp_parallel.rules.problem import (
    MAX_WAYS,
    Problem,
    divisors,
    nearest,
    nearest_multiples,
    ways,
)
from mcp_parallel.rules.values import BOUNDS
from mcp_parallel.schedules.action import V_SHAPED


def head_problems(config: Config) -> Iterator[Problem]:
    """Heads that do not share out the width, and groups of heads that are not equal."""
    model, tp = config.model, config.parallel.tp
    hidden, heads, kv_heads = model.hidden_size, model.num_heads, model.num_kv_heads
    unit = 2 if model.family == "llama" else 1
    if hidden % (unit * heads):
        high = int(BOUNDS["model.hidden_size"].high)
        fitting = (
            count
            for count in divisors(hidden)
            if hidden // count % unit == 0 and count % kv_heads == 0 and count % tp == 0
        )
        yield Problem(
            "hidden_size over num_heads",
            "model.hidden_size",
            f"be a multiple of 2 * num_heads = {2 * heads} (RoPE turns pairs within a head)"
            if unit == 2
            else f"be a multiple of num_heads = {heads}",
            str(hidden),
            ways("model.hidden_size", nearest_multiples(unit * heads, hidden, 1, high), 2)
            + ways("model.num_heads", nearest(fitting, heads), 1),
        )
    if heads % kv_heads:
        groups = divisors(heads)
        yield Problem(
            "num_heads over num_kv_heads",
            "model.num_kv_heads",
            f"divide num_heads = {heads}",
            str(kv_heads),
            ways(
                "model.num_kv_heads",
                nearest([count for count in groups if count % tp == 0] or groups, kv_heads),
            ),
        )


def tensor_problems(config: Config) -> Iterator[Problem]:
    """What tp ranks cannot share out evenly, or at all."""
    model, tp = config.model, config.parallel.tp
    if tp == 1:
        return
    common = math.gcd(model.num_heads, model.num_kv_heads)
    legal = ways("parallel.tp", nearest((t for t in divisors(common) if t <= model.vocab_size), tp))
    for key, size in (("num_heads", model.num_heads), ("num_kv_heads", model.num_kv_heads)):
        if size % tp:
            rule = f"divide {key} = {size}"
            yield Problem(f"{key} over tp", "parallel.tp", rule, str(tp), legal)
    if model.vocab_size < tp:
        rule = f"be at most vocab_size = {model.vocab_size}"
        yield Problem("vocab_size over tp", "parallel.tp", rule, str(tp), legal)


def stage_problems(config: Config) -> Iterator[Problem]:
    """Stages without a layer, and virtual stages that the schedule does not run."""
    layers, parallel = config.model.num_layers, config.parallel
    pp, virtual, schedule = parallel.pp, parallel.virtual_stages, parallel.schedule
    each = Layout.from_config(parallel).stages_per_rank
    stages = pp * each
    if stages > layers:
        yield Problem(
            "num_layers over stages",
            "parallel.pp",
            f"give each of its pp * virtual_stages stages a layer of num_layers = {layers}",
            f"{pp} * {each} = {stages} stages",
            _fewer_stages(config),
        )
    if pp > 1 and schedule in V_SHAPED and virtual > 2:
        yield Problem(
            "virtual_stages of a V",
            "parallel.virtual_stages",
            f"be 2 with schedule {schedule}, which runs two stages a rank",
            str(virtual),
            ways("parallel.virtual_stages", (2,)),
        )
    if virtual > 1 and (pp == 1 or schedule in ("gpipe", "1f1b")):
        reason = "pp = 1" if pp == 1 else f"schedule {schedule}"
        fixes: list[dict[str, Any]] = [{"parallel.virtual_stages": 1}]
        if pp > 1 and stages <= layers:
            fixes.append({"parallel.schedule": "interleaved"})
        yield Problem(
            "virtual_stages unused",
            "parallel.virtual_stages",
            f"be 1 with {reason}",
            str(virtual),
            tuple(fixes),
        )
    if schedule == "interleaved" and pp > 1 and virtual < 2:
        yield Problem(
            "virtual_stages missing",
            "parallel.virtual_stages",
            "be 2 or more with schedule interleaved",
            str(virtual),
            ways("parallel.virtual_stages", range(2, layers // pp + 1), 2)
            + ways("parallel.schedule", ("1f1b",)),
        )


def _fewer_stages(config: Config) -> tuple[dict[str, Any], ...]:
    """Virtual stages or ranks that leave every stage a layer and suit the schedule."""
    layers, parallel = config.model.num_layers, config.parallel
    pp, virtual = parallel.pp, parallel.virtual_stages
    if pp > 1 and parallel.schedule in V_SHAPED:
        plain = {"parallel.pp": min(pp, layers), "parallel.virtual_stages": 1}
        fitting = ways("parallel.pp", range(layers // 2, 1, -1), 2)
        return (*fitting, {**plain, "parallel.schedule": "1f1b"})
    if virtual == 1:
        return ways("parallel.pp", range(layers, 0, -1))
    found = ways("parallel.virtual_stages", range(layers // pp, 1, -1), 2)
    found += ways("parallel.pp", range(layers // virtual, 1, -1), MAX_WAYS - len(found))
    plain = {"parallel.pp": min(pp, layers), "parallel.virtual_stages": 1}
    return found or ({**plain, "parallel.schedule": "1f1b"},)


def legal_layouts_near(
    config: Config, world_size: int, legal: Callable[[Config], bool] | None = None
) -> list[dict[str, int]]:
    """Degrees whose product is ``world_size``, nearest to the configured ones first.

    Args:
        config: has numbers in range.
        world_size: ranks there are.
        legal: says whether a config with such degrees can run; None takes any product.

    Returns:
        At most three ``{"parallel.dp": ..., "parallel.tp": ..., "parallel.pp": ...}``, with
        ``parallel.cp`` where the configured one is above 1.
    """
    wanted, replicas = config.parallel, config.parallel.dp_replicate
    listless = without_lists(wanted)
    dropped = {
        f"parallel.{key}": getattr(listless, key)
        for key in ("stage_split", "dp_shares")
        if getattr(listless, key) != getattr(wanted, key)
    }
    # Sharing a sequence is a choice that long ones ask for: never proposed to who did not make it.
    degrees = [
        (tp, pp, cp)
        for cp in (divisors(world_size) if wanted.cp > 1 else [1])
        for tp in divisors(world_size // cp)
        for pp in divisors(world_size // (cp * tp))
    ]

    def distance(degree: tuple[int, int, int]) -> float:
        target = (wanted.tp, wanted.pp, wanted.cp)
        return sum(abs(math.log(d / t)) for d, t in zip(degree, target, strict=True))

    near = (
        {
            "dp": dp,
            "tp": tp,
            "pp": pp,
            **({"cp": cp} if wanted.cp > 1 else {}),
            **({"dp_replicate": math.gcd(dp, replicas)} if dp % replicas else {}),
        }
        for tp, pp, cp in sorted(degrees, key=distance)[:_TRIED_LAYOUTS]
        if (dp := world_size // (tp * pp * cp))
    )
    runnable = (
        {**{f"parallel.{key}": degree for key, degree in layout.items()}, **dropped}
        for layout in near
        if legal is None or legal(replace(config, parallel=replace(listless, **layout)))
    )
    return list(islice(runnable, MAX_WAYS))


# Enough to find three among the nearest; keeps a message for a million ranks under a tenth of a
# second.
_TRIED_LAYOUTS = 300
