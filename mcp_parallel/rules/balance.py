"""Rules on how layers and rows are shared out: ``stage_split`` and ``dp_shares``. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mcp_parallel.config import Config, ParallelConfig
from mcp_parallel.division import MEASURED, has_equal_shares, listed, numbers_in
from mcp_parallel.errors import shown
from mcp_parallel.layout import Layout, split_layers
from mcp_parallel.rules.problem import Problem, ways

_SPLITS = ("count", "model", *MEASURED)


def split_problems(config: Config) -> Iterator[Problem]:
    """A stage split that is no word for one, or whose numbers are not the model's and layout's."""
    split, num_layers = config.parallel.stage_split, config.model.num_layers
    if split in _SPLITS:
        return
    stages = Layout.from_config(config.parallel).num_stages
    counts = numbers_in(split)
    fits = [{"parallel.stage_split": listed([len(r) for r in split_layers(num_layers, stages)])}]
    words = ways("parallel.stage_split", ("count", "model"))
    if counts is None:
        yield Problem(
            "stage_split word",
            "parallel.stage_split",
            'be count, model, measured, remeasured or numbers like "3,1"',
            shown(split),
            words,
        )
    elif len(counts) != stages or sum(counts) != num_layers or min(counts) < 1:
        yield Problem(
            "stage_split numbers",
            "parallel.stage_split",
            f"give each of {stages} stages at least one of num_layers = {num_layers}, all of them "
            "in sum",
            f"{shown(split)}, {len(counts)} stages of {sum(counts)} layers",
            (*words, *(fits if stages <= num_layers else [])),
        )


def share_problems(config: Config) -> Iterator[Problem]:
    """Shares that are no numbers, not one a replica, or unequal where all have to run alike."""
    parallel, shares = config.parallel, config.parallel.dp_shares
    if shares is None:
        return
    numbers = numbers_in(shares)
    equal = ways("parallel.dp_shares", (None,))
    if shares not in MEASURED and (numbers is None or min(numbers) < 1):
        yield Problem(
            "dp_shares word",
            "parallel.dp_shares",
            'be null, measured, remeasured or whole numbers above 0 like "3,1"',
            shown(shares),
            equal,
        )
        return
    if numbers is not None and len(numbers) != parallel.dp:
        yield Problem(
            "dp_shares over dp",
            "parallel.dp_shares",
            f"give each of dp = {parallel.dp} replicas a number",
            f"{shown(shares)}, {len(numbers)} of them",
            equal,
        )
        return
    if has_equal_shares(config) or parallel.dp == 1:
        return
    if parallel.zero > 1:
        yield Problem(
            "dp_shares with zero",
            "parallel.zero",
            "be 0 or 1 with unequal dp_shares (2 and 3 communicate in each micro-batch, so all "
            "replicas have to run as many)",
            str(parallel.zero),
            (*ways("parallel.zero", (1, 0)), *equal),
        )
    if config.train.optimizer == "onebit_adam":
        yield Problem(
            "dp_shares with onebit_adam",
            "parallel.dp_shares",
            "be null with optimizer onebit_adam (each replica's gradient stands for the whole "
            "batch's when its norm is taken)",
            shown(shares),
            equal,
        )


def without_lists(parallel: ParallelConfig) -> ParallelConfig:
    """``parallel`` for other degrees: numbers that were given for these ones are dropped."""
    if numbers_in(parallel.stage_split) is not None:
        parallel = replace(parallel, stage_split="count")
    if numbers_in(parallel.dp_shares or "") is not None:
        parallel = replace(parallel, dp_shares=None)
    return parallel
