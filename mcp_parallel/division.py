"""Who has which layers and which rows: what ``stage_split`` and ``dp_shares`` come to. No torch."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

from mcp_parallel.config import Config
from mcp_parallel.layout import Layout, split_layers
from mcp_parallel.planner.balance import modelled_costs, split_by_cost

MEASURED = ("measured", "remeasured")
"""Words in place of a split or of shares that ranks have yet to find at the start of a run."""


def numbers_in(text: str) -> list[int] | None:
    """The whole numbers of ``"8,8,7"``; None when it is something else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        return None
    return [int(part) for part in parts]


def listed(numbers: list[int] | tuple[int, ...]) -> str:
    """The inverse of ``numbers_in``."""
    return ",".join(str(number) for number in numbers)


def stage_layers(config: Config) -> list[range]:
    """The blocks of each stage of a checked config, in the order of the model.

    A split that is yet to be measured is the modelled one here, which is what is known of it.
    """
    layout, num_layers = Layout.from_config(config.parallel), config.model.num_layers
    split = config.parallel.stage_split
    if split == "count" or layout.pp == 1:
        return split_layers(num_layers, layout.num_stages)
    counts = numbers_in(split)
    if counts is None:
        counts = split_by_cost(num_layers, layout, modelled_costs(config))
    bounds = accumulate(counts, initial=0)
    return [range(start, stop) for start, stop in pairwise(bounds)]


def microbatch_counts(config: Config) -> list[int]:
    """Micro-batches that each data-parallel replica runs in a step of a checked config.

    Shares that are yet to be measured are equal here.
    """
    train, dp = config.train, config.parallel.dp
    total = train.global_batch_size // train.micro_batch_size
    shares = numbers_in(config.parallel.dp_shares or "")
    if shares is None:
        return [total // dp] * dp
    return [total * share // sum(shares) for share in shares]


def has_equal_shares(config: Config) -> bool:
    """Whether all replicas surely train on as many rows as each other."""
    shares = config.parallel.dp_shares
    return shares is None or len(set(numbers_in(shares) or (0, 1))) == 1


def rows_of(config: Config, dp: int) -> range:
    """The rows of the global batch that replica ``dp`` trains on."""
    if config.parallel.dp_shares is None:
        share = config.train.global_batch_size // config.parallel.dp
        return range(dp * share, (dp + 1) * share)
    counts, size = microbatch_counts(config), config.train.micro_batch_size
    start = sum(counts[:dp]) * size
    return range(start, start + counts[dp] * size)


def is_settled(config: Config) -> bool:
    """Whether nothing of the division is left to be measured."""
    parallel = config.parallel
    waits = parallel.stage_split in MEASURED and parallel.pp > 1
    return not waits and not (parallel.dp_shares in MEASURED and parallel.dp > 1)


def smallest_shares(counts: list[int] | tuple[int, ...]) -> list[int]:
    """The same proportions in the smallest whole numbers."""
    common = math.gcd(*counts)
    return [count // common for count in counts]
