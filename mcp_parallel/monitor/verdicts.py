"""One line when something leaves its healthy range: told once, and again only after it was gone.

No torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp_parallel.monitor.fields import VERDICTS
from mcp_parallel.monitor.metrics import drop_rows_after

# Judgements in a row without a finding after which it counts as gone: what goes in and out of its
# range from step to step is told once.
_CALM = 3


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something outside of its healthy range in one step."""

    kind: str
    """A key of ``fields.VERDICTS``."""
    what: str
    """What was measured, in words."""
    cause: str
    advice: str
    where: str | None = None
    """Layer, module or rank."""
    host: str | None = None
    value: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def text(self) -> str:
        """The verdict in one line."""
        return f"{VERDICTS[self.kind].title}: {self.what}; likely {self.cause}; {self.advice}"

    def to_mapping(self, step: int) -> dict[str, Any]:
        """A line of ``verdicts.jsonl``; keys as in ``fields.VERDICT_KEYS``."""
        numbers = {
            name: number if number is not None and math.isfinite(number) else None
            for name, number in (("value", self.value), ("low", self.low), ("high", self.high))
        }
        return {
            "step": step,
            "kind": self.kind,
            "severity": VERDICTS[self.kind].severity,
            "where": self.where,
            "host": self.host,
            **numbers,
            "text": self.text,
            "cause": self.cause,
            "advice": self.advice,
        }


class Verdicts:
    """The verdicts of a run, in its folder.

    Args:
        path: ``verdicts.jsonl``; lines of steps after ``start_step``, which a run wrote after the
            checkpoint that this one starts from, are dropped.
        start_step: steps done before this run.
    """

    def __init__(self, path: Path, start_step: int = 0) -> None:
        self._path = path
        drop_rows_after(path, start_step)
        self._calm: dict[tuple[str, str | None], int] = {}

    def judge(self, step: int, kinds: Iterable[str], findings: Sequence[Finding]) -> list[Finding]:
        """Write down what is new; returns it.

        Args:
            step: steps done.
            kinds: what was looked for in this step.
            findings: what was found, one a kind, or one a kind and rank.
        """
        found = {_key(finding): finding for finding in findings}
        looked_for = set(kinds)
        new = [finding for key, finding in found.items() if key not in self._calm]
        for key in [key for key in self._calm if key[0] in looked_for and key not in found]:
            self._calm[key] += 1
            if self._calm[key] >= _CALM:
                del self._calm[key]
        self._calm |= dict.fromkeys(found, 0)
        if new:
            with self._path.open("a", encoding="utf-8") as file:
                for finding in new:
                    file.write(json.dumps(finding.to_mapping(step), allow_nan=False) + "\n")
        return new


def _key(finding: Finding) -> tuple[str, str | None]:
    # The worst layer may be another one in each step: it is the same trouble.
    return finding.kind, finding.where if finding.kind == "straggler" else None
