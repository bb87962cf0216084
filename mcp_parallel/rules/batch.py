"""Rules between batch sizes, data parallelism and the pipeline's schedule. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from mcp_parallel.config import Config, ParallelConfig
from mcp_parallel.division import MEASURED, numbers_in, smallest_shares
from mcp_parallel.rules.problem import Problem, divisors, nearest, nearest_multiples, ways
from mcp_parallel.rules.values import BOUNDS


def batch_problems(config: Config) -> Iterator[Problem]:
    """A global batch that ranks and micro-batches do not divide, or too few of them to pipeline."""
    train, parallel = config.train, config.parallel
    shares, (step, least) = _shares(parallel), microbatch_rule(parallel)
    unit = sum(shares) * train.micro_batch_size
    if parallel.dp_shares in MEASURED:
        yield from _measured_problems(config)
        return
    if train.global_batch_size % unit:
        parts = "dp" if len(set(shares)) == 1 else "the sum of dp_shares"
        yield Problem(
            "global_batch_size over dp * micro_batch_size",
            "train.global_batch_size",
            f"be a multiple of {parts} * micro_batch_size = {sum(shares)} * "
            f"{train.micro_batch_size}",
            str(train.global_batch_size),
            ways("train.global_batch_size", _global_sizes(config), 2)
            + ways("train.micro_batch_size", _micro_sizes(config), 1)
            or ({"parallel.dp": 1, "parallel.dp_shares": None, "train.micro_batch_size": 1},),
        )
        return
    each = train.global_batch_size // unit
    counts = [each * share for share in shares if not _pipelines(parallel, each * share)]
    if counts:
        rule = (
            f"a multiple of pp = {step}" if step > 1 else f"at least {_times_pp(parallel, least)}"
        )
        yield Problem(
            "micro-batches over pp",
            "train.micro_batch_size",
            f"leave {rule} micro-batches to schedule {parallel.schedule}",
            f"{train.micro_batch_size} and {counts[0]} of them",
            ways("train.micro_batch_size", _micro_sizes(config), 2)
            + ways("train.global_batch_size", _global_sizes(config), 1)
            or ({"parallel.pp": 1, "parallel.virtual_stages": 1},),
        )


def _measured_problems(config: Config) -> Iterator[Problem]:
    """A batch of which replicas of any speed could not have what they need."""
    train, parallel = config.train, config.parallel
    step, least = microbatch_rule(parallel)
    unit = train.micro_batch_size * step
    low = parallel.dp * -(-least // step) * unit
    if train.global_batch_size % unit == 0 and train.global_batch_size >= low:
        return
    high = int(BOUNDS["train.global_batch_size"].high)
    yield Problem(
        "global_batch_size over measured shares",
        "train.global_batch_size",
        f"be a multiple of {unit} and at least {low}, so that each of dp = {parallel.dp} replicas "
        "can have its micro-batches",
        str(train.global_batch_size),
        ways("train.global_batch_size", nearest_multiples(unit, train.global_batch_size, low, high))
        or ({"parallel.dp": 1, "parallel.dp_shares": None},),
    )


def _shares(parallel: ParallelConfig) -> list[int]:
    """Shares of the replicas in small numbers, equal ones where none are given that are shares."""
    numbers = numbers_in(parallel.dp_shares or "") or []
    usable = len(numbers) == parallel.dp and min(numbers) > 0
    return smallest_shares(numbers) if usable else [1] * parallel.dp


def microbatch_rule(parallel: ParallelConfig) -> tuple[int, int]:
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
    step, least = microbatch_rule(parallel)
    return num_microbatches % step == 0 and num_microbatches >= least


def _global_sizes(config: Config) -> list[int]:
    """Global batches near the configured one that keep shares and the micro-batch."""
    train, parallel = config.train, config.parallel
    step, least = microbatch_rule(parallel)
    shares = _shares(parallel)
    unit = sum(shares) * train.micro_batch_size
    low = unit * -(-least // min(shares))
    high = int(BOUNDS["train.global_batch_size"].high)
    return nearest_multiples(unit * step, train.global_batch_size, low, high)


def _micro_sizes(config: Config) -> list[int]:
    """Micro-batches near the configured one that keep shares and the global batch."""
    train, parallel = config.train, config.parallel
    shares = _shares(parallel)
    rows, rest = divmod(train.global_batch_size, sum(shares))
    if rest:
        return []
    fitting = (
        size
        for size in divisors(rows)
        if all(_pipelines(parallel, rows // size * share) for share in shares)
    )
    return nearest(fitting, train.micro_batch_size)
