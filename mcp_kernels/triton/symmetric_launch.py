"""A launch of a symmetric-memory kernel: all that it is started with.

``cubin.compile_launch`` takes a ``Launch`` and compiles what a GPU would run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


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


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel with its arguments."""

    kernel: Any
    num_programs: int
    args: dict[str, Any]
    """Tensors, numbers, tuples of numbers; None for a tensor that is not there."""
    constants: dict[str, Any]
    """``tl.constexpr`` arguments."""
    tile: Tile

    def options(self) -> dict[str, Any]:
        """What Triton compiles it with; sums keep their order, so nothing is contracted."""
        return {
            "num_warps": self.tile.num_warps,
            "num_stages": self.tile.num_stages,
            "enable_fp_fusion": False,
        }

    def run(self, device: torch.device) -> None:
        """Start it, on ``device``'s current stream."""
        with torch.cuda.device(device if device.type == "cuda" else -1):
            self.kernel[(self.num_programs,)](**self.args, **self.constants, **self.options())
