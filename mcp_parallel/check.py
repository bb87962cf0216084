"""Whether a configuration can run: every rule, before any process starts. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from mcp_parallel.config import Config
from mcp_parallel.errors import ConfigError, shown
from mcp_parallel.rules import (
    balance,
    batch,
    context,
    data,
    hosts,
    layout,
    optimizer,
    values,
    zero,
)
from mcp_parallel.rules.family import data_problems, family_problems
from mcp_parallel.rules.nearest import nearest_layouts
from mcp_parallel.rules.problem import Problem

MAX_RANKS = 1 << 20
"""Most ranks that a job may have."""
Rule = Callable[[Config], Iterator[Problem]]


class _Family(NamedTuple):
    """Rules that only make sense when the numbers they divide by are in range."""

    rules: tuple[Rule, ...]
    reads: frozenset[str]


_DEGREES = frozenset({"parallel.dp", "parallel.tp", "parallel.pp", "parallel.cp"})
_LAYOUT = (
    _Family(
        (layout.head_problems, layout.tensor_problems),
        frozenset(
            {
                "model.hidden_size",
                "model.num_heads",
                "model.num_kv_heads",
                "model.vocab_size",
                "parallel.tp",
            }
        ),
    ),
    _Family((context.context_problems,), frozenset({"model.seq_len", "parallel.cp"})),
    _Family(
        (layout.stage_problems,),
        frozenset({"model.num_layers", "parallel.pp", "parallel.virtual_stages"}),
    ),
    _Family(
        (batch.batch_problems,),
        frozenset(
            {
                "train.global_batch_size",
                "train.micro_batch_size",
                "parallel.dp",
                "parallel.pp",
                "parallel.virtual_stages",
            }
        ),
    ),
    _Family(
        (balance.split_problems,),
        frozenset({"model.num_layers", "parallel.pp", "parallel.virtual_stages"}),
    ),
    _Family((balance.share_problems,), frozenset({"parallel.dp", "parallel.zero"})),
    _Family(
        (zero.replica_problems,),
        frozenset({"parallel.zero", "parallel.dp", "parallel.dp_replicate"}),
    ),
    _Family(
        (zero.empty_part_problems,),
        frozenset(
            {
                "model.num_heads",
                "model.num_kv_heads",
                "model.ffn_size",
                "model.vocab_size",
                "parallel.zero",
                "parallel.dp_replicate",
                *_DEGREES,
            }
        ),
    ),
)
_DOCUMENTS = (
    _Family(
        (context.document_problems,),
        frozenset({"model.vocab_size", "data.document_separator"}),
    ),
)
_MODEL = (
    _Family(
        (family_problems,),
        frozenset(
            {
                "model.image_size",
                "model.patch_size",
                "model.channels",
                "model.num_classes",
                "parallel.cp",
            }
        ),
    ),
)
_OPTIMIZER = (
    _Family(
        (optimizer.onebit_problems,),
        frozenset({"parallel.zero", "train.steps", "train.warmup_steps", "train.freeze_step"}),
    ),
)
_FILES = (
    _Family((data_problems,), frozenset({"model.vocab_size", "model.seq_len"})),
    _Family((data.resume_problems,), frozenset()),
)

_BATCHES = ("train.global_batch_size", "train.micro_batch_size")
# What has to be in range for a layout to be judged.
_READ = frozenset[str]().union(*(family.reads for family in _LAYOUT), _BATCHES)


def check(config: Config, world_size: int | None = None, cuts: Sequence[int] = ()) -> None:
    """Refuse a configuration that cannot run, saying everything that is wrong with it.

    Args:
        config: the run.
        world_size: ranks there are, when something else than the config decides it.
        cuts: the first rank of each host but the first, those that are known.

    Raises:
        ConfigError: with a line for each problem, naming the key, the value and up to three
            choices that mend it.

    Cost: milliseconds; reads file sizes and at most the two ends of a token file.
    """
    if world_size is not None and not 1 <= world_size <= MAX_RANKS:
        problem = f"check: world_size must be at least 1 and at most {MAX_RANKS}, got "
        raise ConfigError([problem + shown(world_size) + "; give the number of ranks"])
    # A config built in Python may hold anything: the loader's rules on types come first.
    Config.from_mapping(config.to_mapping())
    problems = find_problems(config, world_size, cuts)
    if problems:
        layouts = find_layouts(config, problems, world_size, cuts)
        raise ConfigError([str(problem) for problem in problems], layouts)


def find_layouts(
    config: Config,
    problems: Sequence[Problem],
    world_size: int | None = None,
    cuts: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """Up to three layouts, nearest first, that mend what in ``problems`` a layout can mend.

    Every one has been through the same rules (see ``rules.nearest``). None where no layout does,
    or where a number is so far out that no layout is near.
    """
    names = {problem.name for problem in problems if not _is_of_layout(problem)}
    if len(names) == len(problems) or {p.key for p in values.range_problems(config)} & _READ:
        return []

    def legal(other: Config) -> bool:
        found = _find_problems(other, (*_MODEL, *_LAYOUT, *_OPTIMIZER, *_DOCUMENTS))
        found += hosts.host_problems(other, cuts)
        return {problem.name for problem in found} <= names

    return nearest_layouts(config, world_size, legal)


def _is_of_layout(problem: Problem) -> bool:
    """Whether another layout may mend it: it is about a degree, or one of its ways out is."""
    keys = [problem.key, *(key for way in problem.ways if len(way) == 1 for key in way)]
    return problem.key in _BATCHES or any(key.startswith("parallel.") for key in keys)


def find_problems(
    config: Config, world_size: int | None = None, cuts: Sequence[int] = ()
) -> list[Problem]:
    """What ``check`` would refuse, as records; the config's types are right."""
    problems = _find_problems(config, (*_MODEL, *_LAYOUT, *_OPTIMIZER, *_DOCUMENTS, *_FILES))
    out_of_range = {problem.key for problem in values.range_problems(config)}
    if world_size is not None and not out_of_range & _DEGREES:
        problems += _world_problems(config, world_size)
    if not out_of_range & {*_DEGREES, "parallel.link_domain"}:
        problems += hosts.host_problems(config, cuts)
    return problems


def _find_problems(config: Config, families: tuple[_Family, ...]) -> list[Problem]:
    """The problems of ``families`` and of single keys."""
    problems = list(values.range_problems(config))
    out_of_range = {problem.key for problem in problems}
    problems += values.not_yet_problems(config)
    problems += values.relation_problems(config)
    problems += _run(families, config, out_of_range)
    return problems


def _run(
    families: tuple[_Family, ...], config: Config, out_of_range: set[str]
) -> Iterator[Problem]:
    for family in families:
        if not out_of_range & family.reads:
            for rule in family.rules:
                yield from rule(config)


def _world_problems(config: Config, world_size: int) -> Iterator[Problem]:
    """Degrees whose product is not the number of ranks."""
    degrees = config.parallel
    product = degrees.dp * degrees.tp * degrees.pp * degrees.cp
    if product == world_size:
        return
    yield Problem(
        "world_size",
        "parallel.dp",
        f"make dp * tp * pp * cp the number of ranks, {world_size}",
        f"{degrees.dp} * {degrees.tp} * {degrees.pp} * {degrees.cp} = {product}",
        tuple(layout.legal_layouts_near(config, world_size, _can_run))
        or tuple(layout.legal_layouts_near(config, world_size)[:1]),
    )


def _can_run(config: Config) -> bool:
    out_of_range = {problem.key for problem in values.range_problems(config)}
    return not out_of_range and next(_run(_LAYOUT, config, set()), None) is None
