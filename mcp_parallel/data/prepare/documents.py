"""The documents of text and JSONL files, one at a time, with the place of what is broken."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcp_parallel.data.files import TextFile, kind_of, text_files
from mcp_parallel.errors import joined, shown

JSON_LINES = (".jsonl", ".ndjson")


class SourceError(ValueError):
    """A source that cannot be read as documents; names the file and the place in it."""


def find_sources(source: str) -> tuple[list[TextFile], list[str]]:
    """The files of a folder in the order of their names, or the one file.

    Returns:
        Files, and the names of those that are left out: hidden, empty, or no text.

    Raises:
        SourceError: nothing there, nothing in it, or a kind of file that would have to be read.
        OSError: a folder cannot be listed.
    """
    kind, path = kind_of(source), Path(source).expanduser()
    left_out: list[str] = []
    if kind == "folder":
        found = list(text_files(path))
        names = {file.name for file in found}
        every = (entry.relative_to(path).as_posix() for entry in path.rglob("*") if entry.is_file())
        left_out = sorted(name for name in every if name not in names)
    elif kind == "file":
        found = [TextFile(path.name, path, path.stat().st_size)]
    else:
        raise SourceError(
            f"data: SOURCE must be a text file, a .jsonl file or a folder of them, got "
            f"{shown(source)}; give one that exists"
        )
    for name in [*left_out, *(file.name for file in found)]:
        if name.lower().endswith(".parquet"):
            raise SourceError(
                f"data: SOURCE must be text or JSONL in this version, got {shown(name)}; write its "
                "rows to a .jsonl file"
            )
    if sum(file.size for file in found) == 0:
        raise SourceError(f"data: SOURCE must hold some text, got {shown(source)} with none")
    return found, left_out


def documents(file: TextFile, field: str) -> Iterator[str]:
    """Each line's ``field`` of a JSONL file; any other file is one document.

    Raises:
        SourceError: bytes that are no UTF-8, a line that is no JSON object, or one without text.
    """
    if file.name.lower().endswith(JSON_LINES):
        with file.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _text_of(line, field, f"{file.name} line {number}")
    else:
        yield _decoded(file.path.read_bytes(), file.name)


def _text_of(line: bytes, field: str, place: str) -> str:
    text = _decoded(line, place)
    try:
        value: Any = json.loads(text)
    except ValueError as error:
        raise SourceError(f"data: {place!a} must be JSON, got an error: {error}") from None
    if not isinstance(value, dict):
        raise SourceError(f"data: {place!a} must be a JSON object, got {shown(value)}")
    if not isinstance(value.get(field), str):
        keys = joined((shown(key) for key, held in value.items() if isinstance(held, str)), "and")
        raise SourceError(
            f"data: {place!a} must have text in {shown(field)}, got "
            f"{shown(value.get(field))}; give --field, text is in {keys or 'none of its keys'}"
        )
    return value[field]


def _decoded(content: bytes, place: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(
            f"data: {place!a} must be UTF-8, got byte 0x{content[error.start]:02x} at "
            f"{error.start}; convert it, or leave the file out"
        ) from None
