"""What a GPU check finds, as plain records: checks, measurements, sections, the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from mcp_kernels.gpu_check.timing import Bench


@dataclass(frozen=True, slots=True)
class Check:
    """Something that must hold."""

    name: str
    is_passed: bool
    detail: str
    """The numbers behind it, or the error."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A rate of ours beside those of peers in the same run."""

    name: str
    unit: str
    """"TFLOP/s" or "GB/s"."""
    ours: float
    """By the median time, like every rate here."""
    peers: dict[str, float | str]
    """A rate; or why the peer refused, in words."""
    peak: float | None = None
    """The most that the device can do, where it is known."""
    goals: dict[str, float] = field(default_factory=dict)
    """Least rates: "ours", or a peer's name for the least ratio to it."""

    def ratios(self) -> dict[str, float]:
        """Ours over each peer that ran."""
        return {
            name: self.ours / rate
            for name, rate in self.peers.items()
            if not isinstance(rate, str) and rate > 0
        }

    def missed(self) -> list[str]:
        """Goals that were not reached, in words; a goal against a peer that did not run is none."""
        ratios = self.ratios()
        missed = []
        for name, least in self.goals.items():
            got = self.ours if name == "ours" else ratios.get(name)
            if got is not None and got < least:
                what = self.unit if name == "ours" else f"x {name}"
                missed.append(f"{got:.2f} {what} of {least:g}")
        return missed


@dataclass(frozen=True, slots=True)
class Section:
    """One family of kernels."""

    name: str
    check: Callable[[torch.device], Iterable[Check]]
    measure: Callable[[Bench], Iterable[Measurement]]


@dataclass(frozen=True, slots=True)
class SectionResult:
    """What a section found."""

    name: str
    checks: list[Check]
    measurements: list[Measurement]


@dataclass(frozen=True, slots=True)
class Report:
    """All sections of a run."""

    device: dict[str, Any]
    sections: list[SectionResult]

    @property
    def is_passed(self) -> bool:
        """Whether every check of every section holds; speed alone fails nothing."""
        return all(check.is_passed for section in self.sections for check in section.checks)

    def to_json(self) -> str:
        """The report with ratios and missed goals written out."""
        document = {"is_passed": self.is_passed, **asdict(self)}
        for section, plain in zip(self.sections, document["sections"], strict=True):
            for measurement, entry in zip(section.measurements, plain["measurements"], strict=True):
                entry["ratios"] = measurement.ratios()
                entry["missed"] = measurement.missed()
        return json.dumps(document, indent=2)

    def to_text(self) -> str:
        """The tables that people read."""
        lines = [", ".join(f"{name} {value}" for name, value in self.device.items())]
        for section in self.sections:
            passed = sum(check.is_passed for check in section.checks)
            lines.append(f"\n{section.name}: {passed} of {len(section.checks)} checks hold")
            lines += [
                f"  FAILED {check.name}: {check.detail}"
                for check in section.checks
                if not check.is_passed
            ]
            lines += [line for m in section.measurements for line in _measurement_lines(m)]
        lines.append("\nall checks hold" if self.is_passed else "\nSOME CHECKS FAILED")
        return "\n".join(lines)


def run_section(section: Section, bench: Bench) -> SectionResult:
    """Checks first; an exception of one is a failed check, and nothing is measured after it."""
    checks: list[Check] = []
    try:
        checks.extend(section.check(bench.device))
    except Exception as error:
        checks.append(Check("runs", False, f"{type(error).__name__}: {error}"))
    measurements: list[Measurement] = []
    if all(check.is_passed for check in checks):
        try:
            measurements += section.measure(bench)
        except Exception as error:
            checks.append(Check("is measured", False, f"{type(error).__name__}: {error}"))
    return SectionResult(section.name, checks, measurements)


def _measurement_lines(measurement: Measurement) -> list[str]:
    percent = f" ({measurement.ours / measurement.peak:.0%} of peak)" if measurement.peak else ""
    lines = [f"  {measurement.name}: {measurement.ours:.1f} {measurement.unit}{percent}"]
    ratios = measurement.ratios()
    for name, rate in measurement.peers.items():
        if isinstance(rate, str):
            lines.append(f"    {name}: refused, {rate}")
        else:
            lines.append(f"    {name}: {rate:.1f}, ours is {ratios[name]:.2f}x")
    lines += [f"    goal missed: {words}" for words in measurement.missed()]
    return lines
