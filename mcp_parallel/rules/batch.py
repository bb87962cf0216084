"""Rules between batch sizes, data parallelism and the pipeline's schedule. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from mcp_parallel.config import Config, ParallelConfig
from mcp_parallel.rules.problem import Problem, divisors, nearest, nearest_multiples, ways
from mcp_parallel.rules.values import BOUNDS


def batch_problems(config: Config) -> Iterator[Problem]:
    """A global batch that ranks and micro-batches do not divide, or too few of them to pipeline."""
    train, parallel = config.train, config.parallel
    unit = parallel.dp * train.micro_batch_size
    if train.global_batch_size % unit:
        yield Problem(
            "global_batch_size over dp * micro_batch_size",
            "train.global_batch_size",
            f"be a multiple of dp * micro_batch_size = {parallel.dp} * {train.micro_batch_size}",
            str(train.global_batch_size),
            ways("train.global_batch_size", _global_sizes(config), 2)
            + ways("train.micro_batch_size", _micro_sizes(config), 1)
            or ({"parallel.dp": 1, "train.micro_batch_size": 1},),
        )
        return
    count = train.global_batch_size // unit
    if not _pipelines(parallel, count):
        rule = "a multiple of" if parallel.schedule == "interleaved" else "at least"
        yield Problem(
            "micro-batches over pp",
            "train.micro_batch_size",
            f"leave {rule} pp = {parallel.pp} micro-batches to schedule {parallel.schedule}",
            f"{train.micro_batch_size} and {count} of them",
            ways("train.micro_batch_size", _micro_sizes(config), 2)
            + ways("train.global_batch_size", _global_sizes(config), 1)
            or ({"parallel.pp": 1, "parallel.virtual_stages": 1},),
        )


def _pipelines(parallel: ParallelConfig, num_microbatches: int) -> bool:
    """Whether the schedule runs that many: torch's 1F1B fills every stage before it drains one.

    Interleaved runs rounds of pp micro-batches; gpipe takes any number.
    """
    if parallel.schedule == "interleaved":
        return num_microbatches % parallel.pp == 0
    return parallel.schedule == "gpipe" or num_microbatches >= parallel.pp


def _global_sizes(config: Config) -> list[int]:
    """Global batches near the configured one that keep dp and the micro-batch."""
    train, parallel = config.train, config.parallel
    unit, low = parallel.dp * train.micro_batch_size, 1
    if parallel.schedule == "interleaved":
        unit *= parallel.pp
    elif parallel.schedule != "gpipe":
        low = unit * parallel.pp
    high = int(BOUNDS["train.global_batch_size"].high)
    return nearest_multiples(unit, train.global_batch_size, low, high)


def _micro_sizes(config: Config) -> list[int]:
    """Micro-batches near the configured one that keep dp and the global batch."""
    train, parallel = config.train, config.parallel
    share, rest = divmod(train.global_batch_size, parallel.dp)
    if rest:
        return []
    fitting = (size for size in divisors(share) if _pipelines(parallel, share // size))
    return nearest(fitting, train.micro_batch_size)
