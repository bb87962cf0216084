"""One section of a GPU check in a process of its own: what it does to its GPU context ends with it.

A kernel that reads past its memory leaves a context in which every later call fails, and one that
hangs would take the report along.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcp_kernels.gpu_check.report import Check, Measurement, SectionResult

# A section is a few minutes, most of them Triton's compiler.
TIMEOUT_S = 3600.0


def run_apart(
    name: str, command: Sequence[str], out: Path, timeout_s: float = TIMEOUT_S
) -> SectionResult:
    """What ``command`` wrote to ``out`` about section ``name``; a failed check where it did not.

    Args:
        name: the section.
        command: a GPU check of that section alone, which writes its report to ``out``.
        out: removed first, so that no old report is taken for a new one.
        timeout_s: seconds after which the process is killed.
    """
    out.unlink(missing_ok=True)
    try:
        ended = subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            errors="replace", timeout=timeout_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return _failed(name, f"it must end within {timeout_s:g} s, and did not")
    if not out.exists():
        last = (ended.stderr.strip().splitlines() or ["and said nothing"])[-1]
        return _failed(name, f"its process ended with {ended.returncode}: {last}")
    sections = json.loads(out.read_text())["sections"]
    return section_of(next(section for section in sections if section["name"] == name))


def section_of(plain: dict[str, Any]) -> SectionResult:
    """A section out of a report's JSON."""
    derived = ("ratios", "missed")
    return SectionResult(
        plain["name"],
        [Check(**check) for check in plain["checks"]],
        [
            Measurement(**{key: value for key, value in entry.items() if key not in derived})
            for entry in plain["measurements"]
        ],
    )


def _failed(name: str, detail: str) -> SectionResult:
    return SectionResult(name, [Check("runs", False, detail)], [])
