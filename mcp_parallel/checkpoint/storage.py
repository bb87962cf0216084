"""Tensors to and from safetensors shards: a streaming writer and a mapped reader."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from mcp_parallel.checkpoint.format import (
    BLOCK_BYTES,
    DTYPE_BYTES,
    CheckpointError,
    Crc32,
    check_header,
    encode_header,
    open_regular,
    read_header,
)
from mcp_parallel.checkpoint.manifest import FileRecord

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class _SummedFile:
    """A new file that sums what passes through it, block by block while it is in cache."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o644)
        self._crc = Crc32()
        self.size_bytes = 0

    def write(self, data: memoryview) -> None:
        for start in range(0, len(data), BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            self._crc.update(block)
            while block:
                # A full disk or a file size limit takes a part first and refuses the next write.
                block = block[os.write(self._fd, block) :]
        self.size_bytes += len(data)

    def finish(self) -> FileRecord:
        os.fsync(self._fd)
        return FileRecord(size_bytes=self.size_bytes, checksum=self._crc.hex())

    def close(self) -> None:
        os.close(self._fd)


def write_shard(path: Path, tensors: Sequence[tuple[str, torch.Tensor]]) -> FileRecord:
    """Write ``(key, tensor)`` pairs as the new safetensors file ``path`` and fsync it.

    Returns:
        Its length and checksum, computed while writing: the file is not read back.

    Raises:
        OSError: the file exists, the disk is full, or any other failure of the system's.

    Cost: memory for one tensor at a time where it is on another device or not contiguous.
    """
    if sys.byteorder != "little":
        raise CheckpointError("write_shard: safetensors are little-endian, this machine is not")
    # Wide types first: every tensor then begins at a multiple of its element size.
    ordered = sorted(tensors, key=lambda pair: -pair[1].element_size())
    header = {key: (DTYPE_NAMES[t.dtype], tuple(t.shape)) for key, t in ordered}
    file = _SummedFile(path)
    try:
        file.write(memoryview(encode_header(header)))
        for _, tensor in ordered:
            file.write(_bytes_of(tensor))
        return file.finish()
    finally:
        file.close()


def write_file(path: Path, data: bytes) -> None:
    """Write ``data`` as the new file ``path`` and fsync it.

    Raises:
        OSError: as ``write_shard``.
    """
    file = _SummedFile(path)
    try:
        file.write(memoryview(data))
        file.finish()
    finally:
        file.close()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


class ShardReader:
    """An open shard whose tensors are mapped into memory, one at a time, only when asked for.

    A mapping is private: writing to a tensor that came from here never reaches the file. The file
    must not shrink while it is in use (a page that is gone ends the process with SIGBUS).
    """

    def __init__(
        self, path: Path, where: str, expected: Mapping[str, tuple[str, tuple[int, ...]]]
    ) -> None:
        """Open ``path`` and check its header against ``expected``, ``{key: (dtype, shape)}``.

        Raises:
            CheckpointError: missing, no regular file, or its header says something else.
        """
        self._file = open_regular(path, where)
        try:
            size = os.fstat(self._file.fileno()).st_size
            self._entries = read_header(self._file, size, where)
            check_header(self._entries, expected, where)
        except CheckpointError:
            self._file.close()
            raise

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def tensor(self, key: str) -> torch.Tensor:
        """Tensor ``key``, a view of a mapping that lives as long as it does."""
        entry = self._entries[key]
        dtype = DTYPES[entry.dtype]
        count = (entry.stop - entry.start) // DTYPE_BYTES[entry.dtype]
        if count == 0:
            return torch.zeros(entry.shape, dtype=dtype)
        skip = entry.start % mmap.ALLOCATIONGRANULARITY
        begin = entry.start - skip
        pages = mmap.mmap(
            self._file.fileno(), entry.stop - begin, access=mmap.ACCESS_COPY, offset=begin
        )
        return torch.frombuffer(pages, dtype=dtype, count=count, offset=skip).view(entry.shape)
