"""``parallel: auto``: the planner's choice as a config. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from mcp_parallel.check import find_problems
from mcp_parallel.config import Config
from mcp_parallel.errors import ConfigError
from mcp_parallel.layout import Layout
from mcp_parallel.planner.explain import impossible
from mcp_parallel.planner.layouts import CHECKPOINTING, Job, PlannedLayout
from mcp_parallel.planner.machine import Machine
from mcp_parallel.planner.search import search


class Choice(NamedTuple):
    """What ``choose`` made of a config."""

    config: Config
    line: str
    """For people: what was chosen, and for what."""


def choose(config: Config, machine: Machine, ranks: int | None = None) -> Choice:
    """A config with the degrees that the planner takes for its ranks.

    A config whose degrees make up the number of ranks already, such as the record of a run that is
    resumed, is returned as it is.

    Args:
        config: with ``parallel.auto``.
        machine: a host; ``parallel.ranks`` or ``ranks`` may be several hosts of its kind.
        ranks: of the whole job where something else decides it (torchrun); it wins over
            ``parallel.ranks``, and that over the machine's.

    Raises:
        ConfigError: no layout fits or can run.

    Cost: a search; below a second for 1,024 ranks.
    """
    wanted = ranks or config.parallel.ranks or machine.ranks
    before = Layout.from_config(config.parallel)
    if before.world_size == wanted and wanted > 1:
        line = f"parallel: auto keeps {_degrees(before)}, which it chose for {wanted} ranks"
        return Choice(config, line)
    job = job_of(config, machine, wanted)
    fixed = {"zero": 0} if config.train.optimizer == "onebit_adam" else {}
    found = search(job, fixed=fixed)
    least = CHECKPOINTING.index(config.memory.activation_checkpointing)
    for one in found.ranked:
        level = max(least, CHECKPOINTING.index(one.layout.activation_checkpointing))
        layout = one.layout._replace(activation_checkpointing=CHECKPOINTING[level])
        chosen = with_layout(config, layout)
        if not find_problems(chosen, wanted):
            was = f" (recorded: {_degrees(before)})" if before.world_size > 1 else ""
            line = (
                f"parallel: auto chose {layout} for {wanted} ranks of {machine.hardware.name}"
                f"{was}: predicted {one.cost.step_s:.3g} s a step, "
                f"{one.memory.total / 2**30:.2f} GiB a rank"
            )
            return Choice(chosen, line)
    if found.ranked:
        problems = find_problems(with_layout(config, found.ranked[0].layout), wanted)
        raise ConfigError([str(problem) for problem in problems])
    raise ConfigError(impossible(found, fixed))


def job_of(config: Config, machine: Machine, ranks: int) -> Job:
    """What the planner is asked for a config."""
    return Job(
        model=config.model,
        ranks=ranks,
        hardware=machine.hardware,
        global_batch_size=config.train.global_batch_size,
        precision=config.train.precision,
    )


def with_layout(config: Config, layout: PlannedLayout) -> Config:
    """The config with a planned layout in its tables."""
    parallel = replace(
        config.parallel,
        dp=layout.dp,
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        zero=layout.zero,
        dp_replicate=1,
        schedule=layout.schedule,
        virtual_stages=layout.virtual_stages,
        rank_order=layout.rank_order,
        # Lists of numbers are of the layout that they were written for.
        stage_split=split if (split := config.parallel.stage_split).isalpha() else "count",
        dp_shares=shares if (shares := config.parallel.dp_shares or "").isalpha() else None,
    )
    train = replace(config.train, micro_batch_size=layout.micro_batch_size)
    memory = replace(config.memory, activation_checkpointing=layout.activation_checkpointing)
    return replace(config, parallel=parallel, train=train, memory=memory)


def _degrees(layout: Layout) -> str:
    context = f" cp {layout.cp}" if layout.cp > 1 else ""
    return f"dp {layout.dp} tp {layout.tp} pp {layout.pp}{context}"
