"""``python -m mcp_kernels.gpu_check``: run the sections, print the tables, write the report."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from mcp_kernels._build_info import build_info
from mcp_kernels.gpu_check.apart import run_apart
from mcp_kernels.gpu_check.report import Report, run_section
from mcp_kernels.gpu_check.sections import SECTIONS
from mcp_kernels.gpu_check.timing import Bench


def main(argv: list[str] | None = None) -> int:
    """0: every check holds; 1: one does not; 2: there is no GPU, or bad usage."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu_report.json"))
    parser.add_argument("--section", choices=[s.name for s in SECTIONS], action="append")
    parser.add_argument("--rounds", type=int, default=20, help="timed runs of each body")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.stderr.write(
            "gpu_check: a CUDA device must be usable, got none: torch "
            f"{torch.__version__} is built for "
            f"{'CUDA ' + torch.version.cuda if torch.version.cuda else 'CPU only'}; run it on a "
            "GPU machine (without one, make test runs the kernels in Triton's interpreter)\n"
        )
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    bench = Bench(device, rounds=args.rounds)
    chosen = [s for s in SECTIONS if args.section is None or s.name in args.section]
    results = []
    for section in chosen:
        sys.stderr.write(f"gpu_check: {section.name} ...\n")
        if len(chosen) == 1:
            results.append(run_section(section, bench))
        else:
            part = args.out.with_name(f"{args.out.stem}.{section.name}.json")
            results.append(run_apart(section.name, command_of(section.name, args, part), part))
        # Written after each: what is known is there, whatever the next section does.
        args.out.write_text(Report(describe(device), results).to_json() + "\n")
    report = Report(describe(device), results)
    sys.stdout.write(f"{report.to_text()}\nwritten to {args.out}\n")
    return 0 if report.is_passed else 1


def command_of(section: str, args: argparse.Namespace, out: Path) -> list[str]:
    """The same check of one section, in a process of its own."""
    module = [sys.executable, "-m", "mcp_kernels.gpu_check", "--section", section]
    return [*module, "--rounds", str(args.rounds), "--out", str(out)]


def describe(device: torch.device) -> dict[str, Any]:
    """What the numbers belong to."""
    described: dict[str, Any] = {"torch": torch.__version__, "triton": build_info().triton or "no"}
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        described = {
            "gpu": found.name,
            "capability": f"{found.major}.{found.minor}",
            "memory_gib": round(found.total_memory / 2**30),
            "cuda": torch.version.cuda,
            **described,
        }
    return described


if __name__ == "__main__":
    sys.exit(main())
