"""Where each tensor lies in a flat buffer of blocks, and which blocks belong to which rank.

Tensors lie one after another, each at the start of a block, so that a block's scale is of one
tensor alone. The end is padded to whole blocks of every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

MAX_BLOCK_SIZE = 2**31 - 8
"""Counts are int32."""


@dataclass(frozen=True)
class BlockLayout:
    """A flat buffer of blocks for tensors of ``sizes``, shared by ``world_size`` ranks.

    Raises:
        ValueError: a field breaks its rule.
    """

    sizes: Sequence[int]
    """Elements of each tensor, in the order of the buffer; each >= 0."""
    block_size: int = 1024
    """Elements that share a scale, a positive multiple of 8."""
    world_size: int = 1
    """Ranks that own a chunk each."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.sizes))
        for size in self.sizes:
            if size < 0:
                raise ValueError(f"BlockLayout: sizes must be >= 0, got {size}")
        if not 0 < self.block_size <= MAX_BLOCK_SIZE or self.block_size % 8:
            raise ValueError(
                f"BlockLayout: block_size must be a positive multiple of 8 up to "
                f"{MAX_BLOCK_SIZE}, got {self.block_size}; use 1024"
            )
        if self.world_size < 1:
            raise ValueError(f"BlockLayout: world_size must be >= 1, got {self.world_size}")

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Blocks of each tensor."""
        return tuple(-(-size // self.block_size) for size in self.sizes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First element of each tensor in the buffer, a multiple of ``block_size``."""
        starts, at = [], 0
        for blocks in self.blocks:
            starts.append(at * self.block_size)
            at += blocks
        return tuple(starts)

    @cached_property
    def numel(self) -> int:
        """Elements of all tensors, padding not counted."""
        return sum(self.sizes)

    @cached_property
    def chunk_blocks(self) -> int:
        """Blocks of one rank."""
        return -(-sum(self.blocks) // self.world_size)

    @property
    def num_blocks(self) -> int:
        """Blocks of the buffer, those of pure padding at the end included."""
        return self.chunk_blocks * self.world_size

    @property
    def chunk_numel(self) -> int:
        """Elements of one rank's chunk."""
        return self.chunk_blocks * self.block_size

    @property
    def padded_numel(self) -> int:
        """Elements of the buffer, padding included."""
        return self.num_blocks * self.block_size

    def counts(self, device: torch.device | str = "cpu") -> Tensor:
        """``[num_blocks]`` int32: elements that each block has, 0 where it is padding alone."""
        counts = torch.full((self.num_blocks,), self.block_size, dtype=torch.int32)
        last = 0
        for size, blocks in zip(self.sizes, self.blocks, strict=True):
            last += blocks
            if blocks:
                counts[last - 1] = size - (blocks - 1) * self.block_size
        counts[last:] = 0
        return counts.to(device)
