"""``mcp-parallel launch``: the job of a config or plan, as another launcher takes it. No torch."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from mcp_parallel.check import MAX_RANKS
from mcp_parallel.cli.arguments import RunOptions, add_run_arguments, resolve_arguments, setting
from mcp_parallel.config import Config
from mcp_parallel.errors import OK, ConfigError, joined, shown
from mcp_parallel.launch.jobs import RENDERERS, Job
from mcp_parallel.rules.hosts import host_notes
from mcp_parallel.topology import cuts_between

# Flag, metavar, help; each is the field of ``Job`` of its name. A default is the field's own.
_TEXTS = (
    ("--name", "NAME", "of the job"),
    ("--master", "HOST[:PORT]", "torchrun: one of the nodes, where all meet"),
    ("--env-file", "FILE", "shell settings that each node reads first (see doctor --fix)"),
    ("--python", "PATH", "the interpreter on the nodes"),
    ("--memory", "SIZE", "Slurm, Kubernetes: of a node, 512Gi"),
    ("--time", "TIME", "Slurm: limit of the job, 24:00:00"),
    ("--partition", "NAME", "Slurm: where to queue"),
    ("--account", "NAME", "Slurm: who pays"),
    ("--image", "IMAGE", "Kubernetes: container image with this package"),
    ("--namespace", "NAME", "Kubernetes: where the job lives"),
    ("--claim", "NAME", "Kubernetes: volume claim that holds the run folder"),
    ("--mount", "PATH", "Kubernetes: where the claim is mounted"),
    ("--shm-size", "SIZE", "Kubernetes: of /dev/shm"),
    ("--gpu-resource", "NAME", "Kubernetes: what a GPU is called"),
    ("--rdma", "NAME", "Kubernetes: what a node's network cards are called, such as rdma/ib"),
)
_NUMBERS = (
    ("--nodes", "nodes", 1, "nodes of the job (default: 1)"),
    ("--gpus-per-node", "gpus", 1, "ranks of each node, each with a GPU of its own"),
    ("--ranks-per-node", "ranks", 1, "ranks of each node, on its processors"),
    ("--cpus-per-node", "cpus_per_node", 1, "cores of each node that the ranks share"),
    ("--max-restarts", "max_restarts", 0, "how often ranks are started anew (default: 3)"),
    ("--timeout", "timeout_s", 1, "seconds that a rank waits for another (default: 120)"),
    ("--grace", "grace_s", 1, "seconds to save in, from the signal to the end (default: 300)"),
    ("--monitor-interval", "monitor_interval_s", 1, "seconds between two looks at the ranks"),
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``launch`` command."""
    parser = subparsers.add_parser(
        "launch",
        help="print the torchrun script, Slurm file or Kubernetes manifests of a run",
        description="Check a config or a plan for its nodes, then print the job: what each node "
        "runs, with restarts from the last checkpoint, time to save before a limit, and exit "
        "statuses that end what a restart would not mend.",
    )
    parser.add_argument("kind", choices=sorted(RENDERERS), metavar="KIND", help=joined(RENDERERS))
    add_run_arguments(parser)
    for flag, dest, _, text in _NUMBERS:
        parser.add_argument(flag, dest=f"job_{dest}", metavar="N", help=text)
    for flag, metavar, text in _TEXTS:
        parser.add_argument(flag, dest=f"job_{_field(flag)}", metavar=metavar, help=text)
    parser.add_argument(
        "--numa",
        dest="job_numa",
        action="store_true",
        default=None,
        help="bind each rank to the socket of its GPU",
    )
    parser.add_argument(
        "--plan",
        metavar="FILE",
        help="layouts as `plan --json` prints them; - reads them from a pipe",
    )
    parser.add_argument("--plan-row", metavar="N", default="1", help="which one (default: 1)")
    parser.add_argument("--out", metavar="FILE", help="write it there instead of printing it")
    parser.add_argument("--force", action="store_true", help="let --out replace a file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print or write the job; a ``ConfigError`` says everything that is wrong with it."""
    numbers = _numbers(args)
    nodes = numbers.pop("nodes", 1)
    per_node, on_gpus = _ranks(numbers.pop("gpus", None), numbers.pop("ranks", None))
    if args.plan is not None:
        args.settings = (*_plan_settings(args), *args.settings)
    cuts = cuts_between(per_node, MAX_RANKS)
    config, options = resolve_arguments(args, nodes * per_node, cuts, is_planned_later=True)
    if config.parallel.auto:
        raise ConfigError([_AUTO])
    job = Job(
        config=config,
        nodes=nodes,
        ranks_per_node=per_node,
        on_gpus=on_gpus,
        **numbers,
        **_given(args, config, options),
    )
    text = RENDERERS[args.kind](job)
    notes = host_notes(config, cuts)
    if args.out is not None:
        _write(Path(args.out), text, overwrite=args.force)
    if args.json:
        told = {"ok": True, "kind": args.kind, "out": args.out, "text": text, "notes": notes}
        sys.stdout.write(json.dumps({**told, "config": config.to_mapping()}) + "\n")
        return OK
    for line in notes:
        sys.stderr.write(f"slow on these hosts: {line}\n")
    sys.stdout.write(text if args.out is None else f"{args.out}: {_what_next(args)}\n")
    return OK


_AUTO = (
    "launch: parallel.auto must be false, got true, which plans for the machine that it runs on; "
    "write mcp-parallel plan --gpus N --gpu h100 --json > plan.json, and use --plan plan.json"
)


def _what_next(args: argparse.Namespace) -> str:
    each = "on each node: " if args.kind == "torchrun" else ""
    tool = {"torchrun": "bash", "slurm": "sbatch"}.get(args.kind, "kubectl apply -f")
    return f"{each}{tool} {args.out}"


def _field(flag: str) -> str:
    name = flag[2:].replace("-", "_")
    return {"time": "time_limit"}.get(name, name)


def _numbers(args: argparse.Namespace) -> dict[str, Any]:
    """The numbers that were given, by field."""
    found, problems = {}, []
    for flag, dest, least, _ in _NUMBERS:
        text = getattr(args, f"job_{dest}")
        if text is None:
            continue
        if not (text.isascii() and text.isdigit() and len(text) < 8 and int(text) >= least):
            problems.append(
                f"launch: {flag} must be a number of at least {least}, got {shown(text)}; "
                f"write for example {flag} {max(least, 8)}"
            )
        else:
            found[dest] = int(text)
    if problems:
        raise ConfigError(problems)
    return found


def _ranks(gpus: int | None, ranks: int | None) -> tuple[int, bool]:
    if (gpus is None) == (ranks is None):
        got = "neither" if gpus is None else "both"
        problem = (
            f"launch: the ranks of a node must be given by --gpus-per-node or by --ranks-per-node "
            f"(on its processors), got {got}; write for example --gpus-per-node 8"
        )
        raise ConfigError([problem])
    return (gpus, True) if gpus is not None else (ranks or 1, False)


def _given(args: argparse.Namespace, config: Config, options: RunOptions) -> dict[str, Any]:
    """The fields of ``Job`` that are words: those given, the name, and the folder of the run."""
    named = ["numa", *(_field(flag) for flag, _, _ in _TEXTS)]
    found = {name: value for name in named if (value := getattr(args, f"job_{name}")) is not None}
    found.setdefault("name", f"train-{(config.model.preset or 'own').replace('.', '-')}")
    folder = f"{found.get('mount', '/data')}/runs" if "claim" in found else "runs"
    own = f"{folder}/{found['name']}"
    return found | {"run_dir": own if options.run_dir is None else str(options.run_dir)}


# Keys of a plan's layout -> keys of the config; the others are predictions.
_PLAN_KEYS = {
    "dp": "parallel.dp",
    "tp": "parallel.tp",
    "pp": "parallel.pp",
    "cp": "parallel.cp",
    "schedule": "parallel.schedule",
    "virtual_stages": "parallel.virtual_stages",
    "zero": "parallel.zero",
    "micro_batch_size": "train.micro_batch_size",
    "activation_checkpointing": "memory.activation_checkpointing",
    "rank_order": "parallel.rank_order",
}
# What the layouts of a plan were chosen for.
_PLANNED_FOR = {
    "global_batch_size": "train.global_batch_size",
    "precision": "train.precision",
    "seq_len": "model.seq_len",
}


def _plan_settings(args: argparse.Namespace) -> list[Any]:
    """A layout of the plan, and what it is for, as settings.

    A key that the command line gives another value is refused: the plan is for another run.
    """
    try:
        text = sys.stdin.read() if args.plan == "-" else Path(args.plan).read_text("utf-8")
        plan = json.loads(text)
        rows, job = plan["layouts"], plan.get("job", {})
        if not 1 <= int(args.plan_row) <= len(rows):
            raise ValueError(f"{len(rows)} layouts")
        row = rows[int(args.plan_row) - 1]
        values = {key: row[name] for name, key in _PLAN_KEYS.items() if name in row}
        values |= {key: job[name] for name, key in _PLANNED_FOR.items() if name in job}
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        problem = (
            f"launch: --plan must be what `mcp-parallel plan --json` prints, with layout "
            f"{shown(args.plan_row)[1:-1]}, got {type(error).__name__}: {shown(str(error))[1:-1]}; "
            "write plan --json > FILE first"
        )
        raise ConfigError([problem]) from error
    return [setting("--plan", key, value) for key, value in values.items()]


def _write(path: Path, text: str, *, overwrite: bool) -> None:
    try:
        with path.open("w" if overwrite else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        problem = f"launch: --out must name a file that is not there, got {str(path)!a}"
        raise ConfigError([f"{problem}; choose another, or add --force"]) from None
    except OSError as error:
        problem = f"launch: --out must name a file that can be written, got {str(path)!a}"
        raise ConfigError([f"{problem}: {error.strerror}; choose another folder"]) from error
