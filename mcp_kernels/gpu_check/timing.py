"""Times of ours and of peers, interleaved: every round runs each once, the median counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# More than any L2: what a round reads comes from memory, as in a step that does other things.
_FLUSH_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Bench:
    """How things are timed on a device."""

    device: torch.device
    rounds: int = 20
    warmup: int = 3

    def seconds(self, bodies: dict[str, Callable[[], object]]) -> dict[str, float | str]:
        """Median seconds of each body; or, where it raised, why, in words."""
        times: dict[str, list[float]] = {}
        refused: dict[str, float | str] = {}
        for name, body in bodies.items():
            reason = self._warm_up(body)
            if reason is None:
                times[name] = []
            else:
                refused[name] = reason
        flush = torch.empty(_FLUSH_BYTES if self.device.type == "cuda" else 0, dtype=torch.int8)
        flush = flush.to(self.device)
        for _ in range(self.rounds):
            for name, samples in times.items():
                flush.zero_()
                samples.append(self._time(bodies[name]))
        return {**{name: statistics.median(samples) for name, samples in times.items()}, **refused}

    def rates(
        self, bodies: dict[str, Callable[[], object]], amount: float
    ) -> dict[str, float | str]:
        """``amount`` over the seconds of each body."""
        return {
            name: value if isinstance(value, str) else amount / value
            for name, value in self.seconds(bodies).items()
        }

    def _warm_up(self, body: Callable[[], object]) -> str | None:
        """Why ``body`` cannot run, in words; None where it can."""
        try:
            for _ in range(self.warmup):
                body()
            self._wait()
        except Exception as error:
            return (str(error).splitlines() or [type(error).__name__])[0]
        return None

    def _time(self, body: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            body()
            return time.perf_counter() - start
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        body()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def ours_of(rates: dict[str, float | str], name: str) -> float:
    """The rate of ``name``.

    Raises:
        RuntimeError: it did not run.
    """
    rate = rates.pop(name)
    if isinstance(rate, str):
        raise RuntimeError(f"gpu_check: {name} must run to be measured, got {rate}")
    return rate


def copy_gbps(bench: Bench, num_bytes: int) -> float:
    """GB/s of a copy on the device, bytes read and written: what memory gives in practice."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=bench.device).random_()
    target = torch.empty_like(source)
    rates = bench.rates({"copy": lambda: target.copy_(source)}, 2 * num_bytes / 1e9)
    return ours_of(rates, "copy")
