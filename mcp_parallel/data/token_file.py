"""A token file with an index: mapped, and each block compared with its checksum before it is used.

A file behind a URL is mapped as well, from a copy in the user's cache that starts out as a hole and
fills with what is read. What is there already is told by the checksums alone, so a copy
that a crash, a full disk or another host left half written is mended as it is read. The processes
of a host share the copy: a lock on each part lets one of them fetch it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from mcp_parallel.data import storage
from mcp_parallel.data.cache import cache_folder
from mcp_parallel.data.prepare.index import (
    TOKENS_FILE,
    Index,
    TokenFileError,
    changed_block,
    check_size,
    index_beside,
    is_block,
)

logger = logging.getLogger(__name__)

Verify = Literal["read", "all", "size"]
Fetch = Callable[[int, int], bytes]
"""Gives the bytes between two places of a file."""

# Asked of a storage at once: a request takes as long as these bytes.
_FETCHED_BYTES = 1 << 20


class BlockFile:
    """The bytes of a token file; blocks are checked when they are first asked for.

    A process that is forked knows what its parent has checked.

    Args:
        path: of the file on this machine, of the size that ``index`` says.
        name: what errors call it.
        index: of the file.
        fetch: gives what is not here; None where all of it must be.
    """

    def __init__(self, path: Path, name: str, index: Index, fetch: Fetch | None = None) -> None:
        self.index = index
        self._path, self._name, self._fetch = path, name, fetch
        self._bytes: NDArray[np.uint8] = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        self._checked = np.zeros(len(index.checksums), dtype=bool)

    def trust(self) -> None:
        """Take all blocks as they are."""
        self._checked[:] = True

    def check_all(self) -> None:
        """Check, and fetch, every block. Cost: reads the file once.

        Raises:
            TokenFileError: a block has changed.
            StorageError: one cannot be fetched.
        """
        for number in range(len(self._checked)):
            self._check(number)

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Bytes ``[start, stop)``, a view of the file; raises as ``check_all``."""
        size = self.index.block_bytes
        first, last = start // size, -(-stop // size)
        if not self._checked[first:last].all():
            for number in range(first, last):
                self._check(number)
        return self._bytes[start:stop]

    def _check(self, number: int) -> None:
        if self._checked[number]:
            return
        if not self._is_whole(number):
            if self._fetch is None:
                raise changed_block(self._name, number, self.index)
            self._fill(number, self._fetch)
        self._checked[number] = True

    def _span(self, number: int) -> slice:
        start = number * self.index.block_bytes
        return slice(start, min(start + self.index.block_bytes, self.index.num_bytes))

    def _is_whole(self, number: int) -> bool:
        return is_block(self._bytes[self._span(number)].data, self.index.checksums[number])

    def _fill(self, number: int, fetch: Fetch) -> None:
        """Fetch a block and its neighbours into the file, unless another process does it first."""
        count = max(1, _FETCHED_BYTES // self.index.block_bytes)
        group = number // count
        numbers = range(group * count, min((group + 1) * count, len(self._checked)))
        with self._path.open("r+b") as file, _locked(file.fileno(), group):
            if self._is_whole(number):
                return
            start = self._span(numbers[0]).start
            found = fetch(start, self._span(numbers[-1]).stop)
            for one in numbers:
                span = self._span(one)
                block = found[span.start - start : span.stop - start]
                if is_block(block, self.index.checksums[one]):
                    os.pwrite(file.fileno(), block, span.start)
                    self._checked[one] = True
                elif one == number:
                    raise changed_block(self._name, number, self.index)


@contextlib.contextmanager
def _locked(descriptor: int, number: int) -> Iterator[None]:
    """Keep other processes from fetching the same; without locks they fetch the same bytes."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, number)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, number)


class TokenBlocks:
    """Tokens ``[start, stop)`` of a block file, read as an array is."""

    def __init__(self, file: BlockFile, start: int = 0, stop: int | None = None) -> None:
        self._file = file
        self._dtype = np.dtype(f"<u{file.index.width}")
        self._start = start
        self._stop = file.index.tokens if stop is None else stop

    def __len__(self) -> int:
        return self._stop - self._start

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> NDArray[Any]: ...
    def __getitem__(self, at: int | slice) -> int | NDArray[Any]:
        """One token, or those of a slice without a step."""
        if isinstance(at, int):
            return int(self[at : at + 1][0])
        start, stop, step = at.indices(len(self))
        assert step == 1
        width = self._dtype.itemsize
        first = (self._start + start) * width
        return self._file.read(first, first + max(0, stop - start) * width).view(self._dtype)

    def part(self, start: int, stop: int) -> TokenBlocks:
        """Tokens ``[start, stop)`` of these."""
        return TokenBlocks(self._file, self._start + start, self._start + stop)


def open_blocks(path: str, verify: Verify) -> tuple[TokenBlocks, Index] | None:
    """The tokens of a file with an index, local or behind a URL; None of a local one without.

    Args:
        path: of the token file.
        verify: ``data.verify``. Blocks behind a URL are checked as they come, whatever it is.

    Raises:
        TokenFileError: the file is not what its index says.
        StorageError: a URL that cannot be reached.
        OSError: a file cannot be read, or the cache cannot be written.
    """
    if storage.is_url(path):
        file = _remote(path)
    else:
        index = index_beside(path)
        if index is None:
            _refuse_unchecked(path, verify)
            return None
        _refuse_short(path, index)
        file = BlockFile(storage.local_path(path), path, index)
        if verify == "size":
            file.trust()
    if verify == "all":
        file.check_all()
    return TokenBlocks(file), file.index


def _refuse_unchecked(path: str, verify: Verify) -> None:
    if verify == "all":
        raise TokenFileError(
            f"data: {path!a} must be a {TOKENS_FILE} with its index.json where data.verify = all, "
            "got none; make it with mcp-parallel data, or use data.verify = read"
        )


def _refuse_short(path: str, index: Index) -> None:
    if index.tokens < 2:
        raise TokenFileError(
            f"data: {path!a} must hold two or more tokens, got {index.tokens}; give more text"
        )


def _remote(url: str) -> BlockFile:
    folder, _, name = url.rpartition("/")
    if name != TOKENS_FILE:
        raise TokenFileError(
            f"data: {url!a} must be a {TOKENS_FILE} that mcp-parallel data --out URL wrote, with "
            "its index.json beside it; copy other token files here"
        )
    index = Index.read(folder)
    check_size(url, index, storage.size_of(url))
    _refuse_short(url, index)
    path = _hole(url, index)

    return BlockFile(path, url, index, lambda start, stop: storage.read_range(url, start, stop))


def _hole(url: str, index: Index) -> Path:
    """The cache's copy of this version of the file, of its full size; blocks may be missing."""
    key = hashlib.sha256("\n".join([url, *index.checksums]).encode()).hexdigest()[:32]
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"tokens-{key}.bin"
    with path.open("ab") as file:
        file.truncate(index.num_bytes)
    missing = index.num_bytes - path.stat().st_blocks * 512
    free = shutil.disk_usage(folder).free
    if missing > free:
        logger.warning(
            "data: %s takes up to %d bytes more in %s, where %d are free; XDG_CACHE_HOME moves it",
            ascii(url),
            missing,
            folder,
            free,
        )
    return path
