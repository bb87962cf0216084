"""What a person sees while a run trains: a bar on a terminal, plain lines everywhere else."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

# Plain lines: this many over a run, and one at least this often.
_PLAIN_LINES = 10
_PLAIN_EVERY_S = 10.0
# Drawing a bar takes 2 ms of the training process.
_BAR_EVERY_S = 1.0


class Progress:
    """Shows the steps of a run up to ``total_steps``, starting after ``start_step``.

    On a terminal one line is drawn again and again (rich; ``NO_COLOR`` is honoured). Elsewhere,
    and on a dumb terminal, lines are printed for the first and the last step, for every tenth of
    the run and at least every ten seconds. Output is ASCII where the stream can't take more.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        stream: TextIO | None = None,
        unit: str = "tokens",
    ) -> None:
        out = sys.stdout if stream is None else stream
        is_terminal = out.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        kind = _Bar if is_terminal else _Lines
        self._stream = out
        self._display: _Bar | _Lines | None = kind(out, total_steps, start_step, unit)

    def update(self, record: Mapping[str, Any]) -> None:
        """Show a step: ``step``, ``loss``, ``grad_norm``, ``lr``, ``tokens_per_s``."""
        with self._unharmed():
            if self._display is not None:
                self._display.update(record)

    def say(self, line: str) -> None:
        """Show a line that stays, above what is drawn again and again."""
        with self._unharmed():
            if self._display is not None:
                self._display.say(line)

    def close(self, summary: str = "") -> None:
        """End the display, the last step included, and print ``summary`` below it."""
        with self._unharmed():
            if self._display is not None:
                self._display.close()
                self._stream.write(f"{summary}\n" if summary else "")
                self._stream.flush()

    @contextmanager
    def _unharmed(self) -> Iterator[None]:
        """Training goes on, unwatched, when the terminal or the pipe's reader is gone."""
        try:
            yield
        except OSError:
            self._display = None


def eta_text(seconds: float) -> str:
    """``h:mm:ss``."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"


def describe(record: Mapping[str, Any], unit: str = "tokens") -> str:
    """The numbers of a step in one short text."""
    accuracy, val_loss = record.get("val_accuracy"), record.get("val_loss")
    seen = "" if val_loss is None else f"  val loss {val_loss:.4f}"
    seen = seen if accuracy is None else f"  val accuracy {accuracy:.1%}"
    norm = f"grad norm {record['grad_norm']:.3f}"
    if record.get("skipped"):
        norm = f"skipped (overflow at loss scale {record['loss_scale']:g})"
    return f"loss {record['loss']:.4f}  {norm}  {record['tokens_per_s']:,.0f} {unit}/s{seen}"


class _Lines:
    def __init__(self, stream: TextIO, total_steps: int, start_step: int, unit: str) -> None:
        self._unit = unit
        self._stream = stream
        self._total = total_steps
        self._start_step = start_step
        self._start_s = self._shown_s = time.monotonic()
        self._stride = max(1, -(-total_steps // _PLAIN_LINES))
        self._unshown: Mapping[str, Any] | None = None
        self._any_shown = False

    def update(self, record: Mapping[str, Any]) -> None:
        step = record["step"]
        self._unshown = record
        is_due = (
            not self._any_shown
            or step == self._total
            or step % self._stride == 0
            or time.monotonic() - self._shown_s >= _PLAIN_EVERY_S
        )
        if is_due:
            self._show(record)

    def say(self, line: str) -> None:
        self._stream.write(f"{line}\n")
        self._stream.flush()

    def close(self) -> None:
        if self._unshown is not None:
            self._show(self._unshown)

    def _show(self, record: Mapping[str, Any]) -> None:
        now_s = time.monotonic()
        done = record["step"] - self._start_step
        left_s = (now_s - self._start_s) / done * (self._total - record["step"])
        numbers = describe(record, self._unit)
        self._stream.write(
            f"step {record['step']}/{self._total}  {numbers}  ETA {eta_text(left_s)}\n"
        )
        self._stream.flush()
        self._shown_s = now_s
        self._unshown = None
        self._any_shown = True


class _Bar:
    """Drawn by the steps themselves, not too often; between steps there is nothing new to show."""

    def __init__(self, stream: TextIO, total_steps: int, start_step: int, unit: str) -> None:
        self._unit = unit
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=Console(file=stream),
            auto_refresh=False,
        )
        self._task = self._bar.add_task(
            "train", total=total_steps, completed=start_step, numbers="starting"
        )
        self._bar.start()
        self._unshown: Mapping[str, Any] | None = None
        self._shown_s = -math.inf

    def update(self, record: Mapping[str, Any]) -> None:
        self._unshown = record
        if time.monotonic() - self._shown_s >= _BAR_EVERY_S:
            self._show(record)

    def say(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False)

    def close(self) -> None:
        if self._unshown is not None:
            self._show(self._unshown)
        self._bar.stop()

    def _show(self, record: Mapping[str, Any]) -> None:
        numbers = describe(record, self._unit)
        self._bar.update(self._task, completed=record["step"], numbers=numbers, refresh=True)
        self._shown_s, self._unshown = time.monotonic(), None
