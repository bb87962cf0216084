"""``mcp-parallel report``: run folders as one page of curves, verdicts, layouts. No torch."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcp_parallel.errors import OK, ConfigError, shown_path
from mcp_parallel.report.document import build_document
from mcp_parallel.report.render import as_html
from mcp_parallel.report.runs import read_run

MAX_RUNS = 32
"""Eight colours in four patterns of dashes."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``report`` command."""
    parser = subparsers.add_parser(
        "report",
        help="make one HTML page of one or more runs",
        description="Make one self-contained HTML page of runs: curves, verdicts, layout, memory, "
        "the pipeline's timeline and what differs between their configurations.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--out", default="report.html", metavar="HTML", help="the page (report.html)"
    )
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    parser.add_argument("--json", action="store_true", help="print for programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the page, print a line a run; ``ConfigError`` where a folder holds no run."""
    if len(args.runs) > MAX_RUNS:
        problem = f"report: RUN must be given at most {MAX_RUNS} times, got {len(args.runs)}; "
        raise ConfigError([problem + "make several pages"])
    document = build_document([read_run(Path(path)) for path in args.runs])
    page = as_html(document)
    write_page(Path(args.out), page)
    if args.open and not webbrowser.open(Path(args.out).resolve().as_uri()):
        sys.stderr.write(f"report: no browser was found; open {_safe(args.out)} in one\n")
    if args.json:
        summaries = [
            {"name": one["name"], "path": one["path"], "notes": one["notes"], **one["summary"]}
            for one in document["runs"]
        ]
        result = {"ok": True, "report": args.out, "bytes": len(page), "runs": summaries}
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        sys.stdout.write(f"{table(document['runs'])}\n\nreport: {args.out}\n")
    return OK


def write_page(path: Path, page: str) -> None:
    """Replace ``path`` as a whole, so that a browser never reads half of it.

    Raises:
        ConfigError: it cannot be written.
    """
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        _refuse_other(path)
        temporary.write_text(page, encoding="ascii")
        temporary.replace(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        with contextlib.suppress(OSError, ValueError):
            temporary.unlink(missing_ok=True)
        why = getattr(error, "strerror", None) or str(error)
        problem = f"report: --out must name a file that can be written, got {shown_path(path)} "
        raise ConfigError([f"{problem}({why}); choose another"]) from error


def _refuse_other(path: Path) -> None:
    """A page takes the place of a page alone: a slip of the hand must not cost a run's files."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if not path.exists():
        return
    if not path.is_file():
        raise FileExistsError(errno.EEXIST, "it is a device, socket or pipe")
    with path.open("rb") as file:
        start = file.read(len(_PAGE_START))
    if start and start.lower() != _PAGE_START:
        raise FileExistsError(errno.EEXIST, "it is a file, and no page that could be replaced")


_PAGE_START = b"<!doctype html"
_MAX_NAME = 60
_COLUMNS = (
    "run",
    "layout",
    "steps",
    "state",
    "loss",
    "tokens/s",
    "mfu",
    "bubble",
    "memory",
    "verdicts",
)


def table(runs: Sequence[dict[str, Any]]) -> str:
    """A row a run, and below it what its reader must know."""
    rows = [_COLUMNS, *(_row(one) for one in runs)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines += [f"{_safe(one['name'])}: {_safe(note)}" for one in runs for note in one["notes"]]
    return "\n".join(lines)


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    of = one["summary"]
    name = _safe(one["name"])
    return (
        name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 3]}...",
        of["layout"] or "-",
        str(of["steps"]) + ("" if of["total_steps"] is None else f"/{of['total_steps']}"),
        of["state"],
        _number(of["loss"], "{:.4f}"),
        _number(of["tokens_per_s"], "{:,.0f}"),
        _number(of["mfu"], "{:.1%}"),
        _number(of["bubble"], "{:.1%}"),
        _number(of["memory_bytes"], "{:,.0f} MiB", 2**20),
        str(of["verdicts"]),
    )


def _number(value: float | None, form: str, unit: float = 1) -> str:
    return "-" if value is None else form.format(value / unit)


def _safe(text: str) -> str:
    """One line without control characters: a folder's name may hold anything."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
