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
        step, least = _microbatch_rule(parallel)
        rule = (
            f"a multiple of pp = {step}" if step > 1 else f"at least {_times_pp(parallel, least)}"
        )
        yield Problem(
            "micro-batches over pp",
            "train.micro_batch_size",
            f"leave {rule} micro-batches to schedule {parallel.schedule}",
            f"{train.micro_batch_size} and {count} of them",
            ways("train.micro_batch_size", _micro_sizes(config), 2)
            + ways("train.global_batch_size", _global_sizes(config), 1)
            or ({"parallel.pp": 1, "parallel.virtual_stages": 1},),
        )


def _microbatch_rule(parallel: ParallelConfig) -> tuple[int, int]:
    """(multiple of, at least): how many micro-batches the schedule runs.

    Chunks that go round the ranks take rounds of pp micro-batches; DualPipe's V fills twice as
    many stages as ranks before it drains one; gpipe takes any number, the others pp.
    """
    pp, schedule = parallel.pp, parallel.schedule
    if schedule == "interleaved" or (schedule == "zero_bubble" and parallel.virtual_stages > 1):
        return pp, pp
    if pp == 1 or schedule == "gpipe":
        return 1, 1
    return 1, 2 * pp if schedule == "dualpipev" else pp


def _times_pp(parallel: ParallelConfig, least: int) -> str:
    return f"pp = {least}" if least == parallel.pp else f"2 * pp = {least}"


def _pipelines(parallel: ParallelConfig, num_microbatches: int) -> bool:
    step, least = _microbatch_rule(parallel)
    return num_microbatches % step == 0 and num_microbatches >= least


def _global_sizes(config: Config) -> list[int]:
    """Global batches near the configured one that keep dp and the micro-batch."""
    train, parallel = config.train, config.parallel
    step, least = _microbatch_rule(parallel)
    unit = parallel.dp * train.micro_batch_size
    high = int(BOUNDS["train.global_batch_size"].high)
    return nearest_multiples(unit * step, train.global_batch_size, unit * least, high)


def _micro_sizes(config: Config) -> list[int]:
    """Micro-batches near the configured one that keep dp and the global batch."""
    train, parallel = config.train, config.parallel
    share, rest = divmod(train.global_batch_size, parallel.dp)
    if rest:
        return []
    fitting = (size for size in divisors(share) if _pipelines(parallel, share // size))
    return nearest(fitting, train.micro_batch_size)
