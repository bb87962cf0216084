"""What a token file holds and how to know that it still does: ``index.json`` beside it. No torch.

The index is written last, so a token file without one is not finished. Checksums are of blocks:
a reader checks the part that it is about to read, and fetches no more than that from a URL.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from mcp_parallel.data import storage
from mcp_parallel.errors import shown

TOKENS_FILE, INDEX_FILE, TOKENIZER_FILE = "tokens.bin", "index.json", "tokenizer.json"
VERSION = 3
# A block is checked in a tenth of a millisecond, so one for each of a batch's samples is no matter.
# Of a file too large for that many lines blocks are larger: the index of 1 TB has 12 MB.
_MIN_BLOCK_BYTES = 1 << 16
_MAX_BLOCKS = 1 << 18
# Half of a SHA-256: a change goes unseen once in 2^128.
_DIGITS = 32
# Version 1 had no key for it.
_BLOCK_BYTES_1 = 64 << 20


class TokenFileError(ValueError):
    """A token file or its index is not what was written."""


@dataclass(frozen=True)
class Part:
    """The tokens of one source file."""

    name: str
    tokens: int
    documents: int


@dataclass(frozen=True)
class Skipped:
    """A source file that was left out, as asked for."""

    name: str
    reason: str


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
    block_bytes: int
    checksums: tuple[str, ...]
    """SHA-256 of each block of ``block_bytes``, its first 128 bits; in version 1 all of it."""
    tokenizer: str = ""
    """SHA-256 of ``tokenizer.json``; files of equal ones can be mixed. Version 1 did not say."""
    skipped: tuple[Skipped, ...] = ()
    """Broken sources that are not in the file."""

    @property
    def tokens(self) -> int:
        """In the whole file."""
        return sum(part.tokens for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Of the whole file."""
        return self.tokens * self.width

    def to_bytes(self) -> bytes:
        """The text of ``index.json``."""
        values = {"version": VERSION, **asdict(self)}
        return json.dumps({**values, "checksum": _own_checksum(values)}, indent=1).encode()

    @classmethod
    def read(cls, folder: Path | str) -> Index:
        """The index of ``folder``, a path or a URL.

        Raises:
            TokenFileError: there is none, or it is broken.
            StorageError: the URL cannot be reached.
        """
        path = storage.below(str(folder), INDEX_FILE)
        try:
            return _parsed(storage.content(path))
        except storage.StorageError:
            raise
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise TokenFileError(
                f"data: {path!a} must be the index of a finished token file, got "
                f"{type(error).__name__}: {shown(str(error))[1:-1]}; run mcp-parallel data again"
            ) from None


def _parsed(text: bytes) -> Index:
    values: Any = json.loads(text)
    if values["version"] == VERSION and values.pop("checksum") != _own_checksum(values):
        raise ValueError("another text than was written")
    version = values.pop("version")
    if version == 1:
        values["block_bytes"] = _BLOCK_BYTES_1
    elif version not in (2, VERSION):
        raise ValueError(f"version {version}")
    parts = tuple(Part(**part) for part in values.pop("parts"))
    skipped = tuple(Skipped(**entry) for entry in values.pop("skipped", ()))
    index = Index(parts=parts, checksums=tuple(values.pop("checksums")), skipped=skipped, **values)
    sizes = (index.width, index.block_bytes, index.vocab_size, *(p.tokens for p in parts))
    if not all(type(size) is int and size >= 0 for size in sizes) or index.width not in (1, 2, 4):
        raise ValueError("sizes that are none")
    if len(index.checksums) != -(-index.num_bytes // index.block_bytes):
        raise ValueError("another number of checksums than blocks")
    return index


def _own_checksum(values: dict[str, Any]) -> str:
    """Of the index itself: a flipped digit of a separator or a size is JSON as before."""
    return digest(json.dumps(values, sort_keys=True).encode())


def block_bytes_for(num_bytes: int) -> int:
    """Bytes of a block of a file: 64 KiB, doubled until there are at most 2^18 blocks."""
    size = _MIN_BLOCK_BYTES
    while size * _MAX_BLOCKS < num_bytes:
        size *= 2
    return size


def digest(block: bytes | bytearray | memoryview) -> str:
    """The checksum of a block."""
    return hashlib.sha256(block).hexdigest()[:_DIGITS]


def is_block(block: bytes | bytearray | memoryview, checksum: str) -> bool:
    """Whether ``checksum`` is of ``block``."""
    return hashlib.sha256(block).hexdigest()[: len(checksum)] == checksum and bool(checksum)


def index_beside(path: str) -> Index | None:
    """The index of the token file ``path``; None of one that ``mcp-parallel data`` did not make.

    Raises:
        TokenFileError: the index is broken, or the file has another size than it says.
        OSError: a file cannot be read.
    """
    location = storage.local_path(path)
    if location.name != TOKENS_FILE or not (location.parent / INDEX_FILE).is_file():
        return None
    index = Index.read(location.parent)
    check_size(path, index, location.stat().st_size)
    return index


def check_size(path: str, index: Index, size: int) -> None:
    """Refuse a token file of another size than its index says.

    Raises:
        TokenFileError: it is.
    """
    if size != index.num_bytes:
        raise TokenFileError(
            f"data: {path!a} must hold {index.tokens} tokens of {index.width} bytes, got "
            f"{size} bytes; run mcp-parallel data again, or copy it again"
        )


def changed_block(path: str, number: int, index: Index) -> TokenFileError:
    """The error of a block that is not what was written."""
    start = number * index.block_bytes
    stop = min(index.num_bytes, start + index.block_bytes)
    return TokenFileError(
        f"data: {path!a} must be as it was written, got other bytes in block {number}, "
        f"between {start} and {stop}; "
        "run mcp-parallel data again, or copy it again"
    )


def verify(folder: Path | str) -> Index:
    """Read every byte of a token file and its tokenizer; compare with its index, returned.

    Args:
        folder: a path or a URL.

    Raises:
        TokenFileError: no index, another size, a block that has changed, or another tokenizer
            than the one that made the tokens.
        StorageError: the URL cannot be reached.
    """
    index, path = Index.read(folder), storage.below(str(folder), TOKENS_FILE)
    try:
        size = storage.size_of(path)
    except FileNotFoundError:
        size = 0
    check_size(path, index, size)
    with storage.opened(path) as file:
        for number, checksum in enumerate(index.checksums):
            if not is_block(read_exactly(file, index.block_bytes), checksum):
                raise changed_block(path, number, index)
    _verify_tokenizer(storage.below(str(folder), TOKENIZER_FILE), index)
    return index


def _verify_tokenizer(path: str, index: Index) -> None:
    if not index.tokenizer:
        return
    try:
        found = hashlib.sha256(storage.content(path)).hexdigest()
    except FileNotFoundError:
        found = None
    if found != index.tokenizer:
        raise TokenFileError(
            f"data: {path!a} must be the tokenizer that made the tokens, got "
            f"{'none' if found is None else 'another'}; copy it again"
        )


def read_exactly(file: IO[bytes], size: int) -> bytes:
    """``size`` bytes, fewer at the end alone, also of a file that gives them in parts."""
    parts, left = [], size
    while left and (part := file.read(left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def replace_file(path: Path, content: bytes) -> None:
    """Write and rename, so that a reader meets the old file or the new one and never half."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # as the token file beside it: others may train on it
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
