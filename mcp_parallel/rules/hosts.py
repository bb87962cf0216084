"""Rules between a layout and the hosts that its ranks stand on. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import takewhile

from mcp_parallel.config import Config
from mcp_parallel.layout import Layout
from mcp_parallel.rules.problem import Problem, divisors, nearest, ways
from mcp_parallel.topology import cuts_between, first_cut


def host_problems(config: Config, cuts: Sequence[int]) -> Iterator[Problem]:
    """Tensor-parallel groups that stand on two hosts: each layer would wait for the network.

    Args:
        config: its degrees are in range.
        cuts: the first rank of each host but the first, those that are known, rising.
    """
    layout, parallel = Layout.from_config(config.parallel), config.parallel
    inside = _cuts(config, cuts)
    cut = first_cut(parallel.tp, inside)
    if cut is None:
        return
    first = cut - cut % parallel.tp
    common = math.gcd(config.model.num_heads, config.model.num_kv_heads)
    fitting = [tp for tp in divisors(math.gcd(common, *inside)) if tp <= config.model.vocab_size]
    yield Problem(
        "tp over hosts",
        "parallel.tp",
        "keep each group of neighbouring ranks on one host"
        if not parallel.link_domain
        else f"keep each group of neighbouring ranks within link_domain = {parallel.link_domain}",
        f"{parallel.tp}, which has ranks {first}-{first + parallel.tp - 1} on both sides of {cut}",
        ways("parallel.tp", nearest(fitting, parallel.tp), 2)
        + ways("parallel.link_domain", [layout.world_size]),
    )


def host_notes(config: Config, cuts: Sequence[int]) -> list[str]:
    """What is legal on these hosts and slow, a line each with the way to less of it."""
    layout, parallel = Layout.from_config(config.parallel), config.parallel
    inside = _cuts(config, cuts)
    notes = []
    if parallel.cp > 1 and first_cut(parallel.cp * parallel.tp, inside) is not None:
        notes.append(
            f"cp = {parallel.cp} x tp = {parallel.tp} neighbouring ranks stand on several hosts: "
            "every layer waits for keys and values from the network; less cp keeps them on one, "
            "parallel.cp_attention = ring hides more of it"
        )
    if parallel.zero == 3 and layout.zero_ranks > 1 and _shards_over_hosts(layout, inside):
        notes.append(
            f"zero = 3 shards parameters over {layout.zero_ranks} ranks of several hosts: each "
            "micro-batch gathers them twice over the network; more parallel.dp_replicate makes "
            "these groups smaller, zero = 1 gathers once a step"
        )
    return notes


def _shards_over_hosts(layout: Layout, cuts: Sequence[int]) -> bool:
    """Whether ranks that ZeRO shards over stand on both sides of a cut."""
    ends: dict[tuple[int, int, int], list[int]] = {}
    for place in layout.places():  # ranks rise along each group, in both orders
        group = layout.data_index(place) // layout.zero_ranks
        ends.setdefault((place.pp, place.tp, group), []).append(layout.rank_of(place))
    return any(line[0] < cut <= line[-1] for line in ends.values() for cut in cuts)


def _cuts(config: Config, cuts: Sequence[int]) -> list[int]:
    """The cuts that slow links make: between hosts, or between the domains of a fast link."""
    domain = config.parallel.link_domain
    world_size = Layout.from_config(config.parallel).world_size
    if domain and cuts:
        cuts = cuts_between(domain, world_size)
    return list(takewhile(lambda cut: cut < world_size, cuts))
