"""Rules of what ZeRO shards over. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mcp_parallel.config import Config
from mcp_parallel.errors import shown
from mcp_parallel.layout import Layout, split_dim
from mcp_parallel.rules.problem import Problem, divisors, nearest, ways


def replica_problems(config: Config) -> Iterator[Problem]:
    """HSDP's replicas that dp does not share out, or that shard nothing."""
    parallel = config.parallel
    dp, replicas = parallel.dp, parallel.dp_replicate
    if replicas == 1:
        return
    one = {"parallel.dp_replicate": 1}
    if dp % replicas:
        yield Problem(
            "dp over dp_replicate",
            "parallel.dp_replicate",
            f"divide dp = {dp}",
            shown(replicas),
            ways("parallel.dp_replicate", nearest(divisors(dp), replicas)),
        )
    if config.train.optimizer == "onebit_adam":
        yield Problem(
            "dp_replicate with onebit_adam",
            "parallel.dp_replicate",
            "be 1 with optimizer onebit_adam (it averages over all of dp by itself)",
            shown(replicas),
            (one, {"train.optimizer": "adamw"}),
        )
    if parallel.zero == 0:
        yield Problem(
            "dp_replicate without zero",
            "parallel.zero",
            "be 1, 2 or 3 with dp_replicate above 1 (plain data parallelism replicates already)",
            "0",
            (*ways("parallel.zero", (1, 2)), one),
        )


def empty_part_problems(config: Config) -> Iterator[Problem]:
    """Sizes of which the last tp ranks get nothing: ``fully_shard`` takes no empty weight."""
    model, parallel = config.model, config.parallel
    if parallel.zero == 0 or Layout.from_config(parallel).zero_ranks == 1:
        return
    common = math.gcd(model.num_heads, model.num_kv_heads)
    for key, size in (("ffn_size", model.ffn_size), ("vocab_size", model.vocab_size)):
        if _reaches_all(size, parallel.tp):
            continue
        degrees = nearest((t for t in divisors(common) if _reaches_all(size, t)), parallel.tp)
        plain = {"parallel.zero": 0}
        if parallel.dp_replicate > 1:
            plain["parallel.dp_replicate"] = 1
        yield Problem(
            f"{key} over tp with zero",
            "parallel.tp",
            f"leave each rank a part of {key} = {size} with zero 1 to 3 (parts of "
            "ceil(size / tp) may leave the last ranks without one)",
            str(parallel.tp),
            (*ways("parallel.tp", degrees, 2), plain),
        )


def _reaches_all(size: int, tp: int) -> bool:
    return split_dim(size, tp, tp - 1)[1] > 0
