"""``mcp-parallel check``: would this configuration run, and as what? Needs no torch."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from mcp_parallel.check import MAX_RANKS
from mcp_parallel.cli.arguments import add_run_arguments, resolve_arguments
from mcp_parallel.config import Config
from mcp_parallel.division import MEASURED, microbatch_counts, stage_layers
from mcp_parallel.errors import BAD_CONFIG, OK, ConfigError
from mcp_parallel.layout import Layout
from mcp_parallel.memory.estimate import estimate
from mcp_parallel.model.traits import traits_of
from mcp_parallel.planner.balance import imbalance, modelled_costs, rank_costs
from mcp_parallel.presets import num_parameters
from mcp_parallel.rules.hosts import host_notes
from mcp_parallel.topology import crossings, cuts_between

_SHOWN_STAGES = 32
"""Lines of stages in the table; JSON has them all."""
_SHOWN_RUNS = 8
"""Runs of ranks in such a line."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``check`` command."""
    parser = subparsers.add_parser(
        "check",
        help="judge a configuration without running it",
        description="Judge a configuration: print what would run, or everything that is wrong "
        "with it, with legal choices, and exit with 2.",
    )
    add_run_arguments(parser)
    parser.add_argument(
        "--world-size", "--world_size", metavar="N", help="ranks there will be, as under torchrun"
    )
    parser.add_argument(
        "--ranks-per-host",
        "--ranks_per_host",
        metavar="N",
        help="ranks of each host: judge which groups cross from one to another, and how much",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the resolved config and what follows from it; 2 and the problems when it is refused."""
    per_host: int | None = None
    try:
        per_host = _number("--ranks-per-host", args.ranks_per_host)
        cuts = cuts_between(per_host, MAX_RANKS) if per_host else ()
        config, options = resolve_arguments(args, _number("--world-size", args.world_size), cuts)
    except ConfigError as error:
        if args.json:
            refusal = {"ok": False, "problems": error.problems, "layouts": error.layouts}
            sys.stdout.write(json.dumps(refusal) + "\n")
        else:
            sys.stderr.write("".join(f"{line}\n" for line in error.lines()))
        return BAD_CONFIG
    summary = summarize(config)
    if per_host:
        summary |= _on_hosts(config, per_host)
    if args.json:
        note = {"note": options.note} if options.note else {}
        text = json.dumps({"ok": True, "config": config.to_mapping(), **note, **summary})
    else:
        note = f"{options.note}\n" if options.note else ""
        text = f"{note}{_table(config, summary)}\n\n{config.to_yaml()}".rstrip()
    sys.stdout.write(f"{text}\n")
    return OK


def _number(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    is_number = text.isascii() and text.isdigit() and len(text) < 10
    if not is_number or (flag == "--ranks-per-host" and int(text) == 0):
        raise ConfigError(
            [f"check: {flag} must be a number of ranks, got {text!a}; write for example 8"]
        )
    return int(text)


def _on_hosts(config: Config, ranks_per_host: int) -> dict[str, Any]:
    """``links``: each axis, hosts of a group, bytes out of a host a step; ``notes``: what is slow.

    ``ranks_per_host`` is there too.
    """
    cuts = cuts_between(ranks_per_host, MAX_RANKS)
    links = [asdict(crossing) for crossing in crossings(config, ranks_per_host)]
    notes = host_notes(config, cuts)
    return {"ranks_per_host": ranks_per_host, "links": links, "notes": notes}


def _host_lines(summary: dict[str, Any]) -> list[str]:
    lines = []
    for link in summary.get("links", ()):
        hosts = link["hosts"]
        where = "within a host" if hosts == 1 else f"over {hosts} hosts"
        cost = f", {_size(link['num_bytes'])} out of a host a step" if hosts > 1 else ""
        lines.append(f"links   {link['axis']}: each group {where}{cost}")
    return lines + [f"slow    {note}" for note in summary.get("notes", ())]


def summarize(config: Config) -> dict[str, Any]:
    """What follows from a legal config, as plain values.

    Returns:
        ``parameters``, ``world_size``, ``microbatches`` (a rank runs in a step, the most of any),
        ``microbatches_by_dp_rank``, ``tokens_per_step``, and ``stages``: for each its ``layers``
        ``[first, past the last]``, the ``pp_rank`` that holds it and the global ``ranks``,
        runs of them ``[first, past the last]``;
        ``stage_costs``: each pipeline rank's part of the operations, and ``imbalance``, how much
        the largest is above their mean;
        ``memory``: for each pipeline rank its predicted ``peak_bytes`` and, at the peak, bytes of
        each of its ``parts``.
    """
    layout, train = Layout.from_config(config.parallel), config.train
    counts, ranges, costs = microbatch_counts(config), stage_layers(config), modelled_costs(config)
    loads = rank_costs([len(layers) for layers in ranges], layout, costs)
    shares = [load / sum(loads) for load in loads]
    stages = []
    for stage, layers in enumerate(ranges):
        pp_rank = layout.stage_owner(stage)
        stages.append(
            {
                "layers": [layers.start, layers.stop],
                "pp_rank": pp_rank,
                "ranks": layout.ranks_at_stage(pp_rank),
            }
        )
    return {
        "parameters": num_parameters(config.model),
        "world_size": layout.world_size,
        "microbatches": max(counts),
        "microbatches_by_dp_rank": counts,
        "tokens_per_step": train.global_batch_size * config.model.seq_len,
        "stages": stages,
        "stage_costs": shares,
        "imbalance": imbalance(shares),
        "memory": _memory(config),
    }


def _memory(config: Config) -> list[dict[str, Any]]:
    found = [estimate(config, pp_rank) for pp_rank in range(config.parallel.pp)]
    return [{"peak_bytes": one.peak_bytes, "parts": one.parts} for one in found]


def _balance_line(split: str, summary: dict[str, Any]) -> str:
    """Each pipeline rank's part of the work, and how long the others wait for the largest."""
    shares = summary["stage_costs"]
    parts = ", ".join(f"{share:.1%}" for share in shares[:_SHOWN_STAGES])
    more = ", ..." * (len(shares) > _SHOWN_STAGES)
    yet = ", as modelled until it is measured" if split in MEASURED else ""
    return (
        f"balance {split}{yet}: {parts}{more} of the operations by pipeline rank, the largest "
        f"{summary['imbalance']:.1%} above the mean"
    )


def _memory_lines(memory: list[dict[str, Any]]) -> list[str]:
    """The pipeline rank that needs most, by part, and how much the others need."""
    most = max(memory, key=lambda rank: rank["peak_bytes"])
    parts = sorted(most["parts"].items(), key=lambda part: -part[1])
    shown = ", ".join(f"{name} {_size(size)}" for name, size in parts if size)
    lines = [f"memory  {_size(most['peak_bytes'])} a rank at its peak: {shown}"]
    if len(memory) > 1:
        each = ", ".join(_size(rank["peak_bytes"]) for rank in memory[:_SHOWN_STAGES])
        lines.append(f"        by pipeline rank: {each}{', ...' * (len(memory) > _SHOWN_STAGES)}")
    return lines


def _size(num_bytes: int) -> str:
    unit, name = (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")
    return f"{num_bytes / unit:.1f} {name}"


def _table(config: Config, summary: dict[str, Any]) -> str:
    model, parallel, train = config.model, config.parallel, config.train
    shape = (
        f"{model.preset or 'own shape'}: {model.num_layers} layers, hidden {model.hidden_size}, "
        f"{model.num_heads} heads ({model.num_kv_heads} kv), {summary['parameters']:,} parameters"
    )
    cp = f" * cp {parallel.cp}" if parallel.cp > 1 else ""
    groups = parallel.dp_replicate
    replicas = f" in {groups} groups of dp {parallel.dp // groups}" if groups > 1 else ""
    ranks = (
        f"{summary['world_size']} ranks = dp {parallel.dp} * tp {parallel.tp} * pp {parallel.pp}"
        f"{cp}, zero {parallel.zero}{replicas}, schedule {parallel.schedule}"
    )
    unit = traits_of(model).position
    each = summary["microbatches_by_dp_rank"]
    unequal = (
        f"dp {' + '.join(map(str, each[:_SHOWN_STAGES]))}{' ...' * (len(each) > _SHOWN_STAGES)}"
    )
    replicas_run = unequal if len(set(each)) > 1 else f"dp {parallel.dp} * {each[0]}"
    samples = (
        f"{train.global_batch_size} samples = {replicas_run} "
        f"micro-batches of {train.micro_batch_size}, {summary['tokens_per_step']:,} {unit} a step"
    )
    lines = [f"model   {shape}", f"layout  {ranks}", f"batch   {samples}"]
    stages = summary["stages"]
    for number, stage in enumerate(stages[:_SHOWN_STAGES]):
        layers, runs = _span(stage["layers"]), stage["ranks"]
        holders = ", ".join(map(_span, runs[:_SHOWN_RUNS])) + ", ..." * (len(runs) > _SHOWN_RUNS)
        lines.append(f"stage   {number}: layers {layers} on ranks {holders}")
    if len(stages) > _SHOWN_STAGES:
        lines.append(f"        and {len(stages) - _SHOWN_STAGES} more stages")
    if parallel.pp > 1:
        lines.append(_balance_line(parallel.stage_split, summary))
    lines += _memory_lines(summary["memory"]) + _host_lines(summary)
    return "\n".join(lines)


def _span(bounds: list[int]) -> str:
    first, past = bounds
    return str(first) if past - first == 1 else f"{first}-{past - 1}"
