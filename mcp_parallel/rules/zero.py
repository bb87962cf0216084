"""Rules of what ZeRO shards over. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from mcp_parallel.config import Config
from mcp_parallel.errors import shown
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
