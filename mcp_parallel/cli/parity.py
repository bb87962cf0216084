"""``mcp-parallel parity``: does every layout compute the same training run?"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mcp_parallel.config import Config
from mcp_parallel.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mcp_parallel.parity.cases import Case


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
        "--case", action="append", metavar="NAME", help="only this row; may be repeated"
    )
    parser.add_argument(
        "--precision", choices=("fp64", "fp32", "both"), default="both", help="default: both"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check every case's configuration, then start the ranks; 1 when a case falls out."""
    from mcp_parallel.check import check
    from mcp_parallel.parity.cases import WORLD_SIZE

    base = Config.from_mapping({"model": {"preset": args.preset}})
    precisions = ("fp64", "fp32") if args.precision == "both" else (args.precision,)
    cases = _chosen(args.case)
    for case in cases:
        check(case.configure(base, precisions[0]))

    from mcp_parallel.data.corpus import open_corpus
    from mcp_parallel.launch.local import launch_local
    from mcp_parallel.parity.run import run_matrix

    corpus = open_corpus(base.data, base.model)
    return launch_local(
        lambda context: run_matrix(base, corpus, context, cases, precisions, as_json=args.json),
        WORLD_SIZE,
    )


def _chosen(names: list[str] | None) -> Sequence[Case]:
    from mcp_parallel.parity.cases import MATRIX

    if not names:
        return MATRIX
    known = {case.name: case for case in MATRIX}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError([f"parity: --case must be one of {', '.join(known)}, got {unknown[0]!r}"])
    return [known[name] for name in names]
