"""A launch of a symmetric-memory kernel, and its tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mcp_kernels.triton import launch


@dataclass(frozen=True, slots=True)
class Tile:
    """Block sizes and the launch options that go with them."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    @property
    def size(self) -> int:
        """Elements of a tile."""
        return self.block_m * self.block_n


class Launch(launch.Launch[Tile]):
    """A launch whose sums keep their order, so nothing is contracted."""

    __slots__ = ()

    contracts: ClassVar[bool] = False
