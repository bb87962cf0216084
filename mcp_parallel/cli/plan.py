"""``mcp-parallel plan``: layouts ranked by predicted step time, or a pipeline drawn. No torch.

With ``--gpus`` the planner ranks every layout of the model; flags that name a degree, the
micro-batch, ZeRO or checkpointing fix it. With ``--draw`` the timeline of one run's pipeline is
drawn.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from mcp_parallel.cli.arguments import (
    add_run_arguments,
    add_setting,
    read_arguments,
    resolve_arguments,
)
from mcp_parallel.config import Config
from mcp_parallel.division import microbatch_counts, stage_layers
from mcp_parallel.errors import OK, ConfigError, joined, shown, shown_path
from mcp_parallel.layout import Layout
from mcp_parallel.planner.balance import modelled_costs, stage_factors
from mcp_parallel.planner.hardware import HARDWARE, Hardware
from mcp_parallel.planner.plan import plan
from mcp_parallel.planner.show import as_text as as_table
from mcp_parallel.rules.values import range_problems, value_of
from mcp_parallel.schedules.build import build_plan
from mcp_parallel.schedules.draw import as_png, as_text
from mcp_parallel.schedules.simulate import Costs, Timeline, simulate

_MAX_ACTIONS = 200_000
"""A timeline of more boxes than this is no picture any more, and takes seconds to make."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``plan`` command."""
    parser = subparsers.add_parser(
        "plan",
        help="rank layouts for a model and GPUs, or draw a pipeline",
        description="With --gpus: rank all layouts of a model by predicted step time, and say why "
        "others cannot run. With --draw: simulate the pipeline of a run and draw its timeline.",
    )
    add_run_arguments(parser)
    add_setting(parser, "--model", key="model.preset", help="same as --preset")
    add_setting(parser, "--batch", key="train.global_batch_size", help="same as --batch-size")
    add_setting(parser, "--seq", key="model.seq_len", help="tokens of a sample")
    parser.add_argument("--gpus", metavar="N", help="GPUs to plan for")
    parser.add_argument(
        "--gpu", default="h100", metavar="NAME", help=f"{joined(HARDWARE)}, or here (h100)"
    )
    parser.add_argument("--gpus-per-node", metavar="N", help="GPUs that the fast link joins")
    parser.add_argument(
        "--inter-node-gbit", metavar="GBIT", help="a GPU's share of the network, one way, in Gb/s"
    )
    parser.add_argument(
        "--precision", metavar="FORMAT", help="bf16, fp16, fp32, or fp8 for matmuls (bf16)"
    )
    parser.add_argument("--top", default="10", metavar="N", help="layouts to print (10)")
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
    """Print ranked layouts, or a timeline; ``ConfigError`` where neither can be made."""
    if (args.draw is None) == (args.gpus is None):
        got = "neither" if args.draw is None else "both"
        problem = (
            f"plan: one of --gpus and --draw must be given, got {got}; use mcp-parallel plan "
            "--preset 70b --gpus 64 --gpu h100, or mcp-parallel plan --draw --pp 4"
        )
        raise ConfigError([problem])
    return _draw(args) if args.gpus is None else _rank_layouts(args)


_FIXING = {
    "parallel.dp": "dp",
    "parallel.tp": "tp",
    "parallel.pp": "pp",
    "parallel.cp": "cp",
    "parallel.zero": "zero",
    "parallel.schedule": "schedule",
    "parallel.virtual_stages": "virtual_stages",
    "parallel.rank_order": "rank_order",
    "train.micro_batch_size": "micro_batch_size",
    "memory.activation_checkpointing": "activation_checkpointing",
}
"""Keys that flags give -> what they fix of every layout."""


def _rank_layouts(args: argparse.Namespace) -> int:
    config, options, given, _ = read_arguments(args)
    problems = list(range_problems(config))
    if problems:
        raise ConfigError([str(problem) for problem in problems])
    fixed = {name: value_of(config, key) for key, name in _FIXING.items() if key in given}
    gpus, is_here = _number("--gpus", args.gpus), args.gpu.lower() == "here"
    # This machine's cores are as fast in fp32 as in anything, and a run's default is that.
    is_given = "train.precision" in given or is_here
    precision = args.precision or (config.train.precision if is_given else "bf16")
    top = _number("--top", args.top)
    found = plan(
        config.model,
        gpus=gpus,
        gpu=_hardware_here(gpus) if is_here else args.gpu,
        gpus_per_node=args.gpus_per_node and _number("--gpus-per-node", args.gpus_per_node),
        inter_node_gbit=args.inter_node_gbit and _gbit(args.inter_node_gbit),
        batch=config.train.global_batch_size if "train.global_batch_size" in given else None,
        precision=precision,
        fixed=fixed,
    )
    text = json.dumps(found.to_mapping(top)) if options.as_json else as_table(found, top)
    sys.stdout.write(f"{text}\n")
    return OK


def _hardware_here(ranks: int) -> Hardware:
    """This machine; its cores are measured the first time, in some seconds."""
    from mcp_parallel.launch.variables import wanted_device
    from mcp_parallel.planner.calibrate import hardware_here

    return hardware_here(ranks, wanted_device())


def _number(flag: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0):
        problem = f"plan: {flag} must be a whole number above 0, got {shown(text)}; write 8"
        raise ConfigError([problem])
    return int(text)


def _gbit(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        problem = f"plan: --inter-node-gbit must be a number, got {shown(text)}; write 400"
        raise ConfigError([problem]) from None


def _draw(args: argparse.Namespace) -> int:
    """Print the timeline, write the picture; ``ConfigError`` for a run without a pipeline."""
    config, options = resolve_arguments(args)
    timeline = timeline_of(config, _costs(args.costs))
    try:
        Path(args.draw).write_bytes(as_png(timeline))
    except OSError as error:
        got = f"{shown_path(args.draw)} ({error.strerror})"
        problem = f"plan: --draw must name a file that can be written, got {got}; choose another"
        raise ConfigError([problem]) from error
    text = json.dumps(to_mapping(timeline)) if options.as_json else as_text(timeline)
    sys.stdout.write(f"{text}\n")
    if not options.as_json:
        sys.stdout.write(f"picture: {args.draw}\n")
    return OK


def timeline_of(config: Config, costs: Costs) -> Timeline:
    """The simulated timeline of a checked config.

    Args:
        config: with ``parallel.pp`` of 2 or more.
        costs: of a rank's whole part of one micro-batch; its chunks share it evenly, or, with a
            ``parallel.stage_split``, all stages by their arithmetic.
    """
    layout = Layout.from_config(config.parallel)
    if layout.pp == 1:
        raise ConfigError(["plan: parallel.pp must be 2 or more to draw a pipeline, got 1; use 2"])
    chunks, count = layout.stages_per_rank, max(microbatch_counts(config))
    if 3 * layout.num_stages * count > _MAX_ACTIONS:
        problem = (
            f"plan: micro-batches times stages must be at most {_MAX_ACTIONS // 3} to draw, got "
            f"{count} * {layout.num_stages}; use a smaller train.global_batch_size"
        )
        raise ConfigError([problem])
    each = Costs(
        costs.forward / chunks,
        costs.input_grad / chunks,
        costs.weight_grad / chunks,
        costs.comm,
        stages=_factors(config),
    )
    return simulate(build_plan(layout.schedule, layout.pp, count, chunks), each)


def _factors(config: Config) -> tuple[float, ...] | None:
    """Cost of each stage over their mean where a split was asked for; by count all are alike."""
    if config.parallel.stage_split == "count":
        return None
    split = [len(layers) for layers in stage_layers(config)]
    return stage_factors(split, modelled_costs(config))


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
    forward, input_grad, weight_grad, comm = values
    return Costs(forward, input_grad, weight_grad, comm)
