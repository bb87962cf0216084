"""What a token file holds and how to know that it still does: ``index.json`` beside it. No torch.

The index is written last, so a token file without one is not finished. Checksums are of blocks:
a reader can check the part that it is about to read.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcp_parallel.errors import shown

TOKENS_FILE, INDEX_FILE = "tokens.bin", "index.json"
VERSION = 1
# Small enough to check before use, large enough that 10 GB take 150 lines.
BLOCK_BYTES = 64 * 2**20


class TokenFileError(ValueError):
    """A token file or its index is not what was written."""


@dataclass(frozen=True)
class Part:
    """The tokens of one source file."""

    name: str
    tokens: int
    documents: int


@dataclass(frozen=True)
class Index:
    """Everything about a token file but its tokens."""

    vocab_size: int
    width: int
    """Bytes of a token, little-endian."""
    separator: int
    """The token that ends each document."""
    parts: tuple[Part, ...]
    """In the order of the file."""
    checksums: tuple[str, ...]
    """SHA-256 of each block of ``BLOCK_BYTES``."""

    @property
    def tokens(self) -> int:
        """In the whole file."""
        return sum(part.tokens for part in self.parts)

    def write(self, folder: Path) -> None:
        """Replace the folder's index as a whole."""
        text = json.dumps(
            {"version": VERSION, "block_bytes": BLOCK_BYTES, **asdict(self)}, indent=1
        )
        replace_file(folder / INDEX_FILE, text.encode())

    @classmethod
    def read(cls, folder: Path) -> Index:
        """The index of ``folder``.

        Raises:
            TokenFileError: there is none, or it is broken.
        """
        path = folder / INDEX_FILE
        try:
            values: Any = json.loads(path.read_bytes())
            if (values.pop("version"), values.pop("block_bytes")) != (VERSION, BLOCK_BYTES):
                raise ValueError("another version")
            parts = tuple(Part(**part) for part in values.pop("parts"))
            return cls(parts=parts, checksums=tuple(values.pop("checksums")), **values)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise TokenFileError(
                f"data: {str(path)!a} must be the index of a finished token file, got "
                f"{type(error).__name__}: {shown(str(error))[1:-1]}; run mcp-parallel data again"
            ) from None


def checksums_of(path: Path) -> Iterator[str]:
    """SHA-256 of each block of a file. Cost: reads it once."""
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield hashlib.sha256(block).hexdigest()


def verify(folder: Path) -> Index:
    """Read every byte of a token file and compare it with its index, which is returned.

    Raises:
        TokenFileError: no index, another size, or a block that has changed.
    """
    index, path = Index.read(folder), folder / TOKENS_FILE
    size = path.stat().st_size if path.is_file() else 0
    if size != index.tokens * index.width:
        raise TokenFileError(
            f"data: {str(path)!a} must hold {index.tokens} tokens of {index.width} bytes, got "
            f"{size} bytes; run mcp-parallel data again"
        )
    for number, (found, wanted) in enumerate(zip(checksums_of(path), index.checksums, strict=True)):
        if found != wanted:
            start = number * BLOCK_BYTES
            raise TokenFileError(
                f"data: {str(path)!a} must be as it was written, got other bytes between {start} "
                f"and {min(size, start + BLOCK_BYTES)}; run mcp-parallel data again"
            )
    return index


def replace_file(path: Path, content: bytes) -> None:
    """Write and rename, so that a reader meets the old file or the new one and never half."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
