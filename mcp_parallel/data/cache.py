"""Many small files as one flat array: written once under the user's cache, mapped by every rank."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mcp_parallel.data.files import TextFile

logger = logging.getLogger(__name__)

SEPARATOR = b"\n"
"""Between two files of a corpus."""


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/mcp_parallel``, or the same under ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a path that is not absolute.
    base = Path(root) if os.path.isabs(root) else Path("~/.cache").expanduser()
    return base / "mcp_parallel"


def joined_bytes(name: str, files: Sequence[TextFile]) -> NDArray[np.uint8]:
    """The bytes of all files in order, one newline between two.

    Args:
        name: what the files are, in the cache's file name: letters, digits, dots, dashes.
        files: what to join. Any change of a path, a size or a modification time makes a new key.

    Returns:
        ``[N]`` uint8, read-only and mapped from the cache, so ranks share one copy in memory. Where
        the cache cannot be written, an array in memory, and a warning says so.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file changed while it was read.
    """
    total = sum(file.size for file in files) + len(SEPARATOR) * (len(files) - 1)
    try:
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"{name}-{_key(files)}.bytes"
        if not path.exists() or path.stat().st_size != total:
            _write(path, files)
        return np.memmap(path, dtype=np.uint8, mode="r", shape=(total,))
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder to expand "~" to
        logger.warning("data: cannot keep a cache (%s); reading %s into memory", error, name)
    return np.frombuffer(SEPARATOR.join(_contents(file) for file in files), dtype=np.uint8)


def _key(files: Sequence[TextFile]) -> str:
    """Changes when a file is added, removed, renamed or edited."""
    digest = hashlib.sha256()
    for file in files:
        stamp = file.path.stat().st_mtime_ns
        digest.update(f"{file.path}\0{file.size}\0{stamp}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:32]


def _contents(file: TextFile) -> bytes:
    content = file.path.read_bytes()
    if len(content) != file.size:
        raise ValueError(
            f"data: {str(file.path)!a} must keep its {file.size} bytes while it is read, got "
            f"{len(content)}; start again when it is no longer written"
        )
    return content


def _write(path: Path, files: Sequence[TextFile]) -> None:
    """Write and rename: another process sees the whole file or none; the last writer wins."""
    handle, temporary = tempfile.mkstemp(prefix=path.name, suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as output:
            for index, file in enumerate(files):
                output.write((SEPARATOR if index else b"") + _contents(file))
            output.flush()
            os.fsync(output.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
