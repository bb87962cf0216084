"""One thing that the doctor looked at. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class ShellLine:
    """A line for the shell that mends something: safe for every job of this user."""

    text: str
    """As ``export NAME=value``, ``unset NAME`` or ``ulimit -S -n N``."""
    reason: str
    """Why, one line."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found and, unless all is well, what is wanted, why, and how to come to it."""

    topic: str
    """What it is about, one or two words."""
    status: Status
    """``problem``: training is impossible; ``note``: slower or riskier than need be; ``ok``."""
    value: str
    """What is there."""
    advice: str = ""
    """How to change it; empty when there is nothing to do."""
    wanted: str = ""
    """What ought to be there."""
    why: str = ""
    """What it costs as it is."""
    fix: ShellLine | None = None
    """What ``--fix`` writes, where a setting of the shell mends it."""

    def __post_init__(self) -> None:
        told = bool(self.advice and self.wanted and self.why)
        assert told or self.status == "ok", f"{self.topic}: what is wanted, why, and how?"


def note(
    topic: str, value: str, *, wanted: str, why: str, how: str, fix: ShellLine | None = None
) -> Finding:
    """A finding of something that works and could be better."""
    return Finding(topic, "note", value, how, wanted, why, fix)


def problem(
    topic: str, value: str, *, wanted: str, why: str, how: str, fix: ShellLine | None = None
) -> Finding:
    """A finding of something that makes training impossible."""
    return Finding(topic, "problem", value, how, wanted, why, fix)


def unset(name: str, reason: str) -> ShellLine:
    """The line that removes a variable."""
    return ShellLine(f"unset {name}", reason)


def export(name: str, value: str, reason: str) -> ShellLine:
    """The line that sets a variable; ``value`` goes into double quotes."""
    return ShellLine(f'export {name}="{value}"', reason)
