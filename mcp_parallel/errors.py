"""Exit statuses of every command, and the error of a configuration that cannot run. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

OK = 0
"""Done."""
FAILED = 1
"""Anything that is not one of the others."""
BAD_CONFIG = 2
"""The configuration or the command line was refused, and no process was started; or data turned out
not to be what was written, after the step was given up and a checkpoint written."""
DIVERGED = 3
"""The loss or a gradient left the finite numbers."""
STOPPED = 4
"""Ended by a signal, after the step was finished and a checkpoint written, or before the first."""


class ConfigError(ValueError):
    """A configuration that is refused, with everything that is wrong with it.

    Attributes:
        problems: one line each, ASCII, naming the key, the value and a way out. Never empty.
        layouts: up to three changes of ``table.key`` to value, nearest first, that give a layout
            which runs; empty where the layout is not what keeps the run from running.
    """

    def __init__(
        self, problems: Sequence[str], layouts: Sequence[Mapping[str, object]] = ()
    ) -> None:
        self.problems: list[str] = list(problems)
        self.layouts: list[dict[str, object]] = [dict(layout) for layout in layouts]
        super().__init__("\n".join(self.lines()))

    def lines(self) -> list[str]:
        """What a person reads: the problems, and one line of the layouts if there are any."""
        if not self.layouts:
            return self.problems
        each = (
            joined((f"{k} = {'null' if v is None else v}" for k, v in layout.items()), "and")
            for layout in self.layouts
        )
        return [*self.problems, f"check: nearest layouts that run; use {', or '.join(each)}"]

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str], list[dict[str, object]]]]:
        return type(self), (self.problems, self.layouts)


def shown(value: object) -> str:
    """``value`` as an error message prints it: ASCII, one line, at most 80 characters."""
    text = spelled(value)
    return text if len(text) <= 80 else text[:77] + "..."


def spelled(value: object) -> str:
    """``value`` as a message prints what the reader is to write: ASCII, one line, never cut."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int) and value.bit_length() > 200:
        # str() of a huge integer is quadratic, and refused above 4300 digits.
        return f"an integer of {value.bit_length()} bits"
    return ascii(value)


_PATH_MAX = 4096  # bytes: Linux's limit


def shown_path(path: str | os.PathLike[str] | None) -> str:
    """A path or URL as an error message prints it: whole, for its end tells one from another.

    What no system takes for a path is cut as any other value is.
    """
    text = None if path is None else os.fspath(path)
    return shown(text) if text is None or len(text) > _PATH_MAX else ascii(text)


def joined(values: Iterable[object], last: str = "or") -> str:
    """``1, 2 or 4``: how a message lists its choices."""
    words = [str(value) for value in values]
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"
