"""What blocks give and which feed-forward units react, over the global batch of one step.

Hooks stand on the modules for that one step alone, and read what a forward pass makes anyway. What
checkpointing makes a second time is the same and changes neither a mean nor a largest value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mcp_kernels.spans import communication
from mcp_parallel.model.stage import Block
from mcp_parallel.parallel.mesh import DATA, Mesh
from mcp_parallel.parallel.parallelize import Stage

# A unit is dead when it stays below this for every token of a global batch. Freshly drawn units of
# the presets reach 0.05 to 0.5; ReLU's dead ones, and SiLU's and GELU's far below zero, give 0.
DEAD_BELOW = 1e-4
# Of each block: elements, their sum and sum of squares; dead units and all.
NUM_FIGURES = 5


def moments_of(x: Tensor) -> Tensor:
    """Number of elements, their sum and the sum of their squares, float64 ``[3]``.

    A row is summed in float32 at least, rows in float64: errors stay those of short sums.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows = x.detach().flatten(0, -2)
    sums = torch.sum(rows, dim=-1, dtype=dtype).double().sum()
    squares = torch.linalg.vector_norm(rows, dim=-1, dtype=dtype).double().square().sum()
    count = torch.full_like(sums, x.numel())
    return torch.stack([count, sums, squares]).cpu()


class Activations:
    """Statistics of one step's forward passes on this rank.

    Args:
        stages: of this rank.
        mesh: this rank's.
        num_blocks: of the whole model.
    """

    def __init__(self, stages: Sequence[Stage], mesh: Mesh, num_blocks: int) -> None:
        self._mesh, self._num_blocks = mesh, num_blocks
        self._moments: dict[int, Tensor] = {}
        self._largest: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        for stage in stages:
            for name, block in stage.model.blocks.items():
                assert isinstance(block, Block)
                self._watch(int(name), block)

    def _watch(self, index: int, block: Block) -> None:
        layout, place = self._mesh.layout, self._mesh.coordinate
        # Without sequence parallelism tp ranks have the same output: one of them is enough.
        if layout.tp == 1 or layout.sequence_parallel or place.tp == 0:
            self._handles.append(
                block.register_forward_hook(lambda _, args, out: self._add_output(index, out))
            )
        last = block.ffn.w2
        assert isinstance(last, nn.Module)
        self._handles.append(
            last.register_forward_pre_hook(lambda _, args: self._add_units(index, args[0]))
        )

    def remove(self) -> None:
        """Take the hooks off; what was read stays."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @torch.no_grad()
    def _add_output(self, index: int, out: Any) -> None:
        if out.numel():
            self._moments[index] = self._moments.get(index, 0) + moments_of(out)

    @torch.no_grad()
    def _add_units(self, index: int, units: Any) -> None:
        if not units.numel():
            return
        largest = units.detach().abs().flatten(0, -2).amax(0).float()
        before = self._largest.get(index)
        self._largest[index] = largest if before is None else torch.maximum(before, largest)

    def share(self) -> Tensor:
        """This rank's share of the sums, float64 ``[blocks, NUM_FIGURES]``; collective over dp.

        Every rank of dp and cp has seen other tokens, so the units that any of them woke are alive.
        """
        figures = torch.zeros(self._num_blocks, NUM_FIGURES, dtype=torch.float64)
        for index, moments in self._moments.items():
            figures[index, :3] = moments
        alive = {i: (largest >= DEAD_BELOW).float() for i, largest in self._largest.items()}
        group = self._mesh.group(DATA)
        if alive and group is not None:
            flat = torch.cat([alive[i] for i in sorted(alive)])
            with communication("sum of live units"):
                dist.all_reduce(flat, group=group)
            parts = flat.split([alive[i].numel() for i in sorted(alive)])
            alive = dict(zip(sorted(alive), parts, strict=True))
        # Ranks of dp and cp agree by now, and a share is the same of one copy and of several.
        for index, votes in alive.items():
            figures[index, 3] = (votes == 0).sum()
            figures[index, 4] = votes.numel()
        return figures
