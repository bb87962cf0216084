"""A kernel with all that it is started with.

What a GPU runs and what ``cubin.compile_launch`` compiles is the same, whoever makes the launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch


class Warps(Protocol):
    """What Triton is told of a tile, whatever else the tile says."""

    @property
    def num_warps(self) -> int:
        """Warps of a program."""
        ...

    @property
    def num_stages(self) -> int:
        """Depth of the pipeline of loads."""
        ...


TileT = TypeVar("TileT", bound=Warps)


@dataclass(frozen=True, slots=True)
class Launch(Generic[TileT]):
    """One kernel with its arguments."""

    kernel: Any
    num_programs: int
    args: dict[str, Any]
    """Tensors, numbers, tuples of numbers; None for a tensor that is not there."""
    constants: dict[str, Any]
    """``tl.constexpr`` arguments."""
    tile: TileT

    contracts: ClassVar[bool] = True
    """A product and a sum are one instruction, as for a score's scale and offset."""

    def options(self) -> dict[str, Any]:
        """What Triton compiles it with."""
        return {
            "num_warps": self.tile.num_warps,
            "num_stages": self.tile.num_stages,
            "enable_fp_fusion": self.contracts,
        }

    def run(self, device: torch.device) -> None:
        """Start it, on ``device``'s current stream; with no programs there is nothing to start."""
        if self.num_programs == 0:
            return
        with torch.cuda.device(device if device.type == "cuda" else -1):
            self.kernel[(self.num_programs,)](**self.args, **self.constants, **self.options())
