"""``mcp-parallel parity``: does every layout compute the same training run?"""

from __future__ import annotations

import argparse
import json
import sys
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from mcp_parallel.config import Config
from mcp_parallel.errors import OK, ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mcp_parallel.parity.cases import Case

# float64: parameter, gradient, two moments and the value before on four replicas (dp4), two whole
# copies of the update on each of eight ranks, and the references of rank 0.
_BYTES_PER_PARAMETER = 8 * (4 * 5 + 8 * 2 + 8)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``parity`` command."""
    parser = subparsers.add_parser(
        "parity",
        help="prove that every layout trains alike on this machine",
        description="Train each layout for 5 steps in one worker set of 8 CPU ranks and compare "
        "loss, gradient norm and every parameter's update with one process.",
    )
    parser.add_argument("--preset", default="tiny", help="model to train (default: tiny)")
    parser.add_argument(
        "--case",
        action="append",
        metavar="NAME",
        help="only the rows of this name or pattern ('*zbv*'); may be repeated",
    )
    parser.add_argument("--list", action="store_true", help="print the rows' names and run nothing")
    parser.add_argument(
        "--precision",
        action="append",
        choices=("fp64", "fp32", "bf16", "fp16", "both", "all"),
        help="both is fp64 and fp32; bf16 and fp16 run the 16-bit cases; may be repeated "
        "(default: all)",
    )
    parser.add_argument(
        "--backend",
        choices=("shm", "gloo"),
        help="what carries the ranks' collectives (default: MCP_BACKEND, or shm where it is built)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check every case's configuration, then start the ranks; 1 when a case falls out."""
    from mcp_parallel.check import check
    from mcp_parallel.parity.cases import EXACT, PRECISIONS, WORLD_SIZE

    groups = {"all": PRECISIONS, "both": EXACT}
    base = Config.from_mapping({"model": {"preset": args.preset}})
    asked = {p for name in args.precision or ["all"] for p in groups.get(name, (name,))}
    precisions = [precision for precision in PRECISIONS if precision in asked]
    chosen = _chosen(args.case) if args.case else _that_apply(base)
    cases = [case for case in chosen if set(case.precisions) & set(precisions)]
    if not cases:
        got = ", ".join(precisions)
        problem = (
            f"parity: --precision must be one that the cases are run in, got {got}; "
            "leave it out, or --case"
        )
        raise ConfigError([problem])
    if args.list:
        return _list(cases, precisions, as_json=args.json)
    for case in cases:
        for leg, _ in case.legs():
            check(leg.configure(base, next(p for p in precisions if p in case.precisions)))
    _check_memory(base)

    from mcp_parallel.data.source import open_data
    from mcp_parallel.launch.local import launch_local
    from mcp_parallel.parity.run import run_matrix

    data = open_data(base)
    return launch_local(
        lambda context: run_matrix(base, data, context, cases, precisions, as_json=args.json),
        WORLD_SIZE,
        backend=args.backend,
    )


def _list(cases: Sequence[Case], precisions: Sequence[str], *, as_json: bool) -> int:
    formats = {case.name: [p for p in precisions if p in case.precisions] for case in cases}
    if as_json:
        sys.stdout.write(json.dumps(formats) + "\n")
    else:
        sys.stdout.writelines(f"{name:34} {' '.join(in_)}\n" for name, in_ in formats.items())
    return OK


def _check_memory(base: Config) -> None:
    """Refuse a model whose matrix does not fit, before it takes the machine down."""
    from mcp_parallel.doctor.machine import available_memory_bytes
    from mcp_parallel.presets import PRESETS

    available = available_memory_bytes()
    needed = _needed_bytes(base)
    if available is None or needed <= available:
        return
    smaller = [
        name
        for name in PRESETS
        if _needed_bytes(Config.from_mapping({"model": {"preset": name}})) <= available
    ]
    problem = (
        f"parity: --preset must fit this machine's {available / 2**30:.0f} GiB of free memory, "
        f"got {base.model.preset}, whose matrix needs {needed / 2**30:,.0f} GiB; "
        f"use {' or '.join(smaller) or 'a larger machine'}"
    )
    raise ConfigError([problem])


def _needed_bytes(config: Config) -> int:
    from mcp_parallel.presets import num_parameters

    return num_parameters(config.model) * _BYTES_PER_PARAMETER


def _that_apply(base: Config) -> Sequence[Case]:
    """The matrix without the rows that ``base`` has no room for; says which those are."""
    from mcp_parallel.check import find_problems
    from mcp_parallel.data.image_files import digits_file
    from mcp_parallel.parity.cases import MATRIX

    left_out: dict[str, list[str]] = {}
    for case in MATRIX:
        configs = [leg.configure(base, case.precisions[0]) for leg, _ in case.legs()]
        config = configs[0]
        if case.variation.preset is None and base.model.family != "llama":
            if any(map(find_problems, configs)):
                left_out.setdefault(f"family {base.model.family} refuses", []).append(case.name)
        elif config.model.family == "vit" and digits_file() is None:
            reason = "without scikit-learn (pip install scikit-learn) there are no images for"
            left_out.setdefault(reason, []).append(case.name)
    for reason, names in left_out.items():
        sys.stderr.write(f"{reason} {len(names)} of {len(MATRIX)} rows: {', '.join(names)}\n")
    gone = {name for names in left_out.values() for name in names}
    return [case for case in MATRIX if case.name not in gone]


def _chosen(names: list[str]) -> Sequence[Case]:
    from mcp_parallel.parity.cases import MATRIX

    for name in names:
        if not any(fnmatchcase(case.name, name) for case in MATRIX):
            known = ", ".join(case.name for case in MATRIX)
            problem = f"parity: --case must be one of {known}, or a pattern of some, got {name!r}"
            raise ConfigError([f"{problem}; see --list"])
    return [case for case in MATRIX if any(fnmatchcase(case.name, name) for name in names)]
