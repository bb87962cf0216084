"""``mcp-parallel plan --draw``: the timeline of a run's pipeline, as text and as PNG. No torch."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from mcp_parallel.cli.arguments import add_run_arguments, resolve_arguments
from mcp_parallel.config import Config
from mcp_parallel.errors import OK, ConfigError, shown
from mcp_parallel.layout import Layout
from mcp_parallel.schedules.build import build_plan
from mcp_parallel.schedules.draw import as_png, as_text
from mcp_parallel.schedules.simulate import Costs, Timeline, simulate

_MAX_ACTIONS = 200_000
"""A timeline of more boxes than this is no picture any more, and takes seconds to make."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``plan`` command."""
    parser = subparsers.add_parser(
        "plan",
        help="draw what each pipeline rank does when",
        description="Simulate the pipeline schedule of a run and draw its timeline.",
    )
    add_run_arguments(parser)
    parser.add_argument(
        "--draw",
        nargs="?",
        const="timeline.png",
        metavar="PNG",
        help="print the timeline and write it to PNG (timeline.png)",
    )
    parser.add_argument(
        "--costs",
        default="1,1,1,0",
        metavar="F,I,W,C",
        help="time of a rank's forward, input gradient and weight gradient of one micro-batch, and "
        "of a message, in any unit (1,1,1,0)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the timeline, write the picture; ``ConfigError`` for a run without a pipeline."""
    if args.draw is None:
        raise ConfigError(["plan: --draw must be given; use mcp-parallel plan --draw --pp 4"])
    config, options = resolve_arguments(args)
    timeline = timeline_of(config, _costs(args.costs))
    try:
        Path(args.draw).write_bytes(as_png(timeline))
    except OSError as error:
        raise ConfigError(
            [f"plan: --draw must name a file that can be written, got {shown(args.draw)} ({error})"]
        ) from error
    text = json.dumps(to_mapping(timeline)) if options.as_json else as_text(timeline)
    sys.stdout.write(f"{text}\n")
    if not options.as_json:
        sys.stdout.write(f"picture: {args.draw}\n")
    return OK


def timeline_of(config: Config, costs: Costs) -> Timeline:
    """The simulated timeline of a checked config.

    Args:
        config: with ``parallel.pp`` of 2 or more.
        costs: of a rank's whole part of one micro-batch; its chunks share it evenly.
    """
    layout = Layout.from_config(config.parallel)
    if layout.pp == 1:
        raise ConfigError(["plan: parallel.pp must be 2 or more to draw a pipeline, got 1; use 2"])
    train, chunks = config.train, layout.stages_per_rank
    count = train.global_batch_size // (layout.dp * train.micro_batch_size)
    if 3 * layout.num_stages * count > _MAX_ACTIONS:
        problem = (
            f"plan: micro-batches times stages must be at most {_MAX_ACTIONS // 3} to draw, got "
            f"{count} * {layout.num_stages}; use a smaller train.global_batch_size"
        )
        raise ConfigError([problem])
    each = Costs(
        costs.forward / chunks, costs.input_grad / chunks, costs.weight_grad / chunks, costs.comm
    )
    return simulate(build_plan(layout.schedule, layout.pp, count, chunks), each)


def to_mapping(timeline: Timeline) -> dict[str, Any]:
    """For programs: sizes, ``makespan``, ``bubble`` of each rank, and ``ranks``: the actions.

    An action is ``[kind, stage, microbatch, chunk, start, end]``.
    """
    plan = timeline.plan
    return {
        "schedule": plan.schedule,
        "pp": plan.pp,
        "stages_per_rank": plan.chunks,
        "microbatches": plan.num_microbatches,
        "makespan": timeline.makespan,
        "bubble": [timeline.bubble(rank) for rank in range(plan.pp)],
        "ranks": [[[*s.action, s.start, s.end] for s in spans] for spans in timeline.ranks],
    }


def _costs(text: str) -> Costs:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    ok = len(values) == 4 and all(math.isfinite(v) and 0 <= v < 1e9 for v in values)
    if not ok or min(values[:3]) <= 0:
        problem = (
            "plan: --costs must be four numbers, the first three above 0 and all below 1e9, got "
            f"{shown(text)}; write for example 1,1,1,0"
        )
        raise ConfigError([problem])
    return Costs(*values)
