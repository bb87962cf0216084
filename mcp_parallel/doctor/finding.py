"""One thing that the doctor looked at. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found and, unless all is well, what to change and why."""

    topic: str
    """What it is about, one or two words."""
    status: Status
    """``problem``: training is impossible; ``note``: slower or riskier than need be; ``ok``."""
    value: str
    """What is there."""
    advice: str = ""
    """What to do and why; empty when there is nothing to do."""
