"""Which files the data is, and how many tokens they hold, unread. No numpy, no torch."""

from __future__ import annotations

import os
import stat
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from mcp_parallel.data.storage import is_url, local_path

# The standard library's tests are not prose anyone misses, and are absent on some systems.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)
# As git: a file with a NUL in its first 8000 bytes is not text.
SNIFFED_BYTES = 8000

Kind = Literal["file", "folder", "tokens", "missing", "special", "url"]


class TextFile(NamedTuple):
    """One file of a corpus of text."""

    name: str
    """Path relative to the corpus, with "/"; what files are sorted by."""
    path: Path
    size: int
    """Bytes, which are tokens."""


def kind_of(path: str) -> Kind:
    """What ``data.path`` names; ``special`` is a device, socket or pipe, which is never opened.

    A URL that is not ``file://`` is ``url``, whatever lies there: nothing is asked of the network.
    """
    if is_url(path):
        return "url"
    try:
        mode = local_path(path).stat().st_mode
    except (OSError, ValueError, RuntimeError):  # absent, NUL in the name, "~nobody"
        return "missing"
    if stat.S_ISDIR(mode):
        return "folder"
    if not stat.S_ISREG(mode):
        return "special"
    return "tokens" if path.lower().endswith(".bin") else "file"


def token_width(vocab_size: int) -> int:
    """Bytes of a token in a ``.bin`` file: 2, or 4 when the vocabulary needs it."""
    return 2 if vocab_size <= 1 << 16 else 4


def is_text(path: Path) -> bool:
    """No NUL among the first bytes."""
    with path.open("rb") as file:
        return looks_like_text(file.read(SNIFFED_BYTES))


def looks_like_text(start: bytes) -> bool:
    """No NUL in the first bytes of a file."""
    return b"\0" not in start[:SNIFFED_BYTES]


def text_files(folder: Path) -> Iterator[TextFile]:
    """Non-empty text files below ``folder`` in a fixed order; hidden files and folders are skipped.

    Symbolic links to folders are not followed, so a loop of links ends.
    """
    for directory, file in walk(folder):
        path = Path(directory, file)
        entry = path.stat()
        if stat.S_ISREG(entry.st_mode) and entry.st_size and is_text(path):
            yield TextFile(path.relative_to(folder).as_posix(), path, entry.st_size)


@cache
def stdlib_folder() -> Path:
    """Where this Python keeps its standard library; found out once, for it takes a millisecond."""
    return Path(sysconfig.get_path("stdlib"))


def stdlib_files() -> Iterator[TextFile]:
    """The standard library's own ``*.py`` in a fixed order, no tests, no installed packages."""
    folder = stdlib_folder()
    for directory, file in walk(folder, skipped=_SKIPPED_FOLDERS):
        path = Path(directory, file)
        if file.endswith(".py") and path.is_file() and (size := path.stat().st_size):
            yield TextFile(path.relative_to(folder).as_posix(), path, size)


def walk(folder: Path, *, skipped: frozenset[str] = frozenset()) -> Iterator[tuple[str, str]]:
    """``(directory, file name)`` depth first: each directory's files, then its folders, by name.

    Hidden ones are left out, and links to folders are not followed.
    """

    def fail(error: OSError) -> None:
        raise error  # a folder that cannot be listed would otherwise vanish from the data

    for directory, folders, files in os.walk(folder, onerror=fail):
        folders[:] = sorted(
            name for name in folders if name not in skipped and not name.startswith(".")
        )
        for file in sorted(files):
            if not file.startswith("."):
                yield directory, file
