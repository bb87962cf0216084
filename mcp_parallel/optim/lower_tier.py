"""Where optimizer state lives: beside the parameters, or one tier of memory below them.

Below a GPU is pinned host memory; moments come up for their update, a part at a time, and go down
again. Below a CPU is the disk: moments, and fp32 values of 16-bit weights, are mapped from files
that have no name, so the update works on them as on any memory, the kernel writes back and drops
what does not fit, and they are gone with their process, however it ends. Values are the same bits
on every tier.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

# What is smaller stays in memory: a mapping takes whole pages, and a page fault costs more.
SMALLEST_FILE = 1 << 14
# Bytes of moments on the device at a time: enough to run a bus at full speed.
PART_BYTES = 64 << 20


class LowerTier:
    """Memory for optimizer state, below that of ``device``.

    Args:
        device: of the parameters.
        folder: of the files, on a disk, not in memory; made where it is missing. Only a CPU's
            state needs it; None is the machine's folder for temporary files.

    Raises:
        OSError: the folder has no room for the state, or cannot be written; raised before any
            update.
    """

    def __init__(self, device: torch.device, folder: Path | None = None) -> None:
        self.device = device
        self._folder = folder

    @property
    def is_far(self) -> bool:
        """Whether state has to come up to the device for its update."""
        return self.device.type != "cpu"

    def zeros_like(self, tensor: Tensor) -> Tensor:
        """Zeros of the shape and dtype of ``tensor``."""
        if self.is_far:
            return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        size = tensor.numel() * tensor.element_size()
        if size < SMALLEST_FILE:
            return torch.zeros_like(tensor)
        with tempfile.TemporaryFile(dir=self._made_folder()) as file:
            # All of it now: a disk that is full is an error here and a dead process later.
            os.posix_fallocate(file.fileno(), 0, size)
            mapped = mmap.mmap(file.fileno(), size)
        return torch.frombuffer(mapped, dtype=tensor.dtype).view(tensor.shape)

    def _made_folder(self) -> Path | None:
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder


def parts(tensors: Sequence[Tensor], most_bytes: int = PART_BYTES) -> Iterator[range]:
    """Consecutive indices of ``tensors``, ``most_bytes`` together unless one alone is larger."""
    start, room = 0, most_bytes
    for index, tensor in enumerate(tensors):
        size = tensor.numel() * tensor.element_size()
        if size > room and index > start:
            yield range(start, index)
            start, room = index, most_bytes
        room -= size
    if start < len(tensors):
        yield range(start, len(tensors))
