"""``mcp-parallel doctor``: what is usable here, and what to change and why."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mcp_parallel.doctor.env_file import DEFAULT_FILE, shell_lines, write_env_file
from mcp_parallel.errors import FAILED, OK

if TYPE_CHECKING:
    from mcp_parallel.doctor import Finding

_STATUS_WIDTH = 9
_MAX_WIDTH = 110  # longer lines are hard to read however wide the terminal is


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``doctor`` command."""
    parser = subparsers.add_parser(
        "doctor",
        help="what is usable on this machine and what to change",
        description="Look at torch, kernels, devices, processor, limits, network and settings. "
        "Exit status 1 when something makes training impossible.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--fix",
        nargs="?",
        const=DEFAULT_FILE,
        metavar="FILE",
        help="write the settings of the shell that mend what was found, with reasons, to be "
        f"sourced (default: {DEFAULT_FILE}); changes nothing else",
    )
    parser.add_argument("--force", action="store_true", help="let --fix replace a file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine and print; 1 when there is a problem."""
    from mcp_parallel.doctor import examine

    findings = examine()
    if args.fix is not None:
        write_env_file(findings, Path(args.fix), overwrite=args.force)
    problems = sum(finding.status == "problem" for finding in findings)
    sys.stdout.write(_as_json(findings) if args.json else _as_table(findings))
    if args.fix is not None and not args.json:
        count = len(shell_lines(findings))
        sys.stdout.write(f"{args.fix}: {count} settings; read it, then: . {args.fix}\n")
    return FAILED if problems else OK


def _as_json(findings: Sequence[Finding]) -> str:
    rows = [
        {
            "topic": finding.topic,
            "status": finding.status,
            "value": finding.value,
            "wanted": finding.wanted,
            "why": finding.why,
            "advice": finding.advice,
            "fix": finding.fix.text if finding.fix else None,
        }
        for finding in findings
    ]
    is_ok = all(finding.status != "problem" for finding in findings)
    return json.dumps({"ok": is_ok, "findings": rows}, indent=2) + "\n"


def _as_table(findings: Sequence[Finding]) -> str:
    topic_width = max(len(finding.topic) for finding in findings) + 2
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
    indent = " " * (_STATUS_WIDTH + topic_width)
    lines: list[str] = []
    for finding in findings:
        head = f"{finding.status:<{_STATUS_WIDTH}}{finding.topic:<{topic_width}}"
        lines += _wrapped(head + finding.value, width, indent)
        if finding.advice:
            told = f"wanted: {finding.wanted}; {finding.why}"
            lines += _wrapped(f"{indent}   {told}", width, f"{indent}   ")
            lines += _wrapped(f"{indent}-> {finding.advice}", width, f"{indent}   ")
    counts = dict.fromkeys(("ok", "note", "problem"), 0)
    for finding in findings:
        counts[finding.status] += 1
    verdict = "training is impossible here" if counts["problem"] else "training works here"
    lines.append(
        f"\n{verdict}: {counts['ok']} ok, {counts['note']} notes, {counts['problem']} problems"
    )
    return "\n".join(lines) + "\n"


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(
        text.encode("ascii", "backslashreplace").decode("ascii"),
        max(width, len(indent) + 20),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
