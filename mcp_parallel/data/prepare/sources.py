"""The files that a token file is made of: found, named, and told apart by kind. No torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, NamedTuple

from mcp_parallel.data import storage
from mcp_parallel.data.files import kind_of, walk
from mcp_parallel.errors import shown_path

JSON_LINES, PARQUET = (".jsonl", ".ndjson"), (".parquet",)
# What writers of many files leave beside them.
_MARKERS = frozenset({"_SUCCESS", "_metadata", "_common_metadata"})


class SourceError(ValueError):
    """A source that cannot be read as documents; names the file and the place in it."""


class Shard(NamedTuple):
    """One file of a source."""

    name: str
    """Below the source, with "/"."""
    path: str
    """On this machine, or a URL."""
    size: int
    """Bytes."""
    stamp: str
    """Changes when the file does."""

    @property
    def kind(self) -> Literal["jsonl", "parquet", "text"]:
        """By the end of its name."""
        name = self.name.lower()
        if name.endswith(JSON_LINES):
            return "jsonl"
        return "parquet" if name.endswith(PARQUET) else "text"


def find_sources(source: str, out: str | None = None) -> tuple[list[Shard], list[str]]:
    """The files of a folder, each folder's own before those of its folders; or the one file.

    Args:
        source: a path or a URL.
        out: folder or URL of the result; where it is inside of the source, it is no part of it.

    Returns:
        Files, and the names of those that are left out: hidden ones, markers, links to folders,
        and what is no file, such as a pipe or a link to nothing.

    Raises:
        SourceError: nothing there, or nothing in it, or ``out`` is the source itself.
        StorageError: a URL that cannot be used or reached.
        OSError: a folder cannot be listed.
    """
    if storage.is_url(source):
        found, hidden = _remote(source)
    else:
        found, hidden = _local(source)
    own = None if out is None else _place_in(source, out)
    if own is not None:
        if not own:
            raise SourceError(
                f"data: --out must be another folder than SOURCE, got {shown_path(out)} for both, "
                "where the next run would read tokens as text; use a folder beside it"
            )
        found = [shard for shard in found if not shard.name.startswith(f"{own}/")]
        hidden = [name for name in hidden if not name.startswith(f"{own}/")]
    if sum(shard.size for shard in found) == 0:
        left_out = f" but {len(hidden)} files that are hidden or no files" if hidden else ""
        raise SourceError(
            f"data: SOURCE must hold some text, got {shown_path(source)} with none{left_out}; give "
            "another file or folder"
        )
    return found, hidden


def _place_in(source: str, out: str) -> str | None:
    """Where ``out`` is below ``source``, empty where it is the same; None where it is elsewhere."""
    if storage.is_url(source) or storage.is_url(out):
        below, within = source.rstrip("/"), out.rstrip("/")
        return within[len(below) :].lstrip("/") if f"{within}/".startswith(f"{below}/") else None
    folder, place = storage.local_path(source).resolve(), storage.local_path(out).resolve()
    if not place.is_relative_to(folder) or not folder.is_dir():
        return None
    return place.relative_to(folder).as_posix() if place != folder else ""


def _local(source: str) -> tuple[list[Shard], list[str]]:
    kind, path = kind_of(source), storage.local_path(source)
    if kind in ("file", "tokens"):
        return [_shard(path.name, str(path))], []
    if kind != "folder":
        raise SourceError(
            "data: SOURCE must be a text, .jsonl or .parquet file or a folder of them, got "
            f"{shown_path(source)}; give one that exists"
        )
    names = [f"{directory}/{file}"[len(str(path)) + 1 :] for directory, file in walk(path)]
    names = [name for name in names if name.rpartition("/")[2] not in _MARKERS]
    kept = [name for name in names if (path / name).is_file()]
    return [_shard(name, str(path / name)) for name in kept], sorted(_every(path) - set(kept))


def _every(path: Path) -> set[str]:
    """All below a folder but real folders."""
    found: set[str] = set()
    for directory, folders, files in os.walk(path):
        links = (name for name in folders if Path(directory, name).is_symlink())
        found.update(f"{directory}/{name}"[len(str(path)) + 1 :] for name in (*files, *links))
    return found


def _shard(name: str, path: str) -> Shard:
    return Shard(name, path, storage.size_of(path), storage.stamp_of(path))


def _remote(url: str) -> tuple[list[Shard], list[str]]:
    entries = storage.listed(url)
    hidden = [e.name for e in entries if any(part[0] in ".\0" for part in e.name.split("/"))]
    left_out = {*hidden, *(e.name for e in entries if e.name.rpartition("/")[2] in _MARKERS)}
    kept = [Shard(*entry) for entry in entries if entry.name not in left_out]
    return sorted(kept, key=lambda shard: _walked(shard.name)), sorted(left_out)


def _walked(name: str) -> tuple[tuple[bool, str], ...]:
    """Sorts names as ``walk`` does: a folder's own files before its folders."""
    *folders, file = name.split("/")
    return (*((True, folder) for folder in folders), (False, file))
