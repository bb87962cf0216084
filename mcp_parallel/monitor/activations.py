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
# Tokens of a micro-batch that wake all units of a healthy model: the others then need no look.
_FIRST_TOKENS = 64
# Of each block: elements, their sum and sum of squares; dead units and all.
NUM_FIGURES = 5


def moments_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the elements and of their squares, float64 ``[]`` each, on the device of ``x``.

    A row is summed in float32 at least, rows in float64: errors stay those of short sums.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows = x.detach().flatten(0, -2)
    sums = torch.sum(rows, dim=-1, dtype=dtype)
    norms = torch.linalg.vector_norm(rows, dim=-1, dtype=dtype).double()
    return sums.sum(dtype=torch.float64), torch.dot(norms, norms)


class Activations:
    """Statistics of one step's forward passes on this rank.

    Args:
        stages: of this rank.
        mesh: this rank's.
        num_blocks: of the whole model.
    """

    def __init__(self, stages: Sequence[Stage], mesh: Mesh, num_blocks: int) -> None:
        self._mesh, self._num_blocks = mesh, num_blocks
        self._counts: dict[int, int] = {}
        self._moments: dict[int, tuple[Tensor, Tensor]] = {}
        self._awake: dict[int, Tensor] = {}
        self._all_awake: set[int] = set()
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
        if not out.numel():
            return
        moments = moments_of(out)
        self._counts[index] = self._counts.get(index, 0) + out.numel()
        if index in self._moments:
            for total, more in zip(self._moments[index], moments, strict=True):
                total.add_(more)
        else:
            self._moments[index] = moments

    @torch.no_grad()
    def _add_units(self, index: int, units: Any) -> None:
        if index in self._all_awake or not units.numel():
            return
        rows = units.detach().flatten(0, -2)
        # A CPU can be asked at once; to ask another device is to wait for it.
        if rows.device.type == "cpu":
            least = rows[:_FIRST_TOKENS].abs().amax(0).amin()
            if least.item() >= DEAD_BELOW:
                self._all_awake.add(index)
                self._awake[index] = torch.ones(rows.shape[-1], dtype=torch.bool)
                return
        awake = rows.abs().amax(0).float() >= DEAD_BELOW
        before = self._awake.get(index)
        self._awake[index] = awake if before is None else before.logical_or_(awake)

    def share(self) -> Tensor:
        """This rank's share of the sums, float64 ``[blocks, NUM_FIGURES]``; collective over dp.

        Every rank of dp and cp has seen other tokens, so the units that any of them woke are alive.
        """
        figures = torch.zeros(self._num_blocks, NUM_FIGURES, dtype=torch.float64)
        if self._moments:
            places = list(self._moments)
            figures[places, 0] = torch.tensor(
                [self._counts[index] for index in places], dtype=torch.float64
            )
            sums = torch.stack([moment for pair in self._moments.values() for moment in pair])
            figures[places, 1:3] = sums.cpu().view(-1, 2)
        if self._awake:
            places = sorted(self._awake)
            awake = [self._awake[index] for index in places]
            votes = torch.cat(awake).float()
            group = self._mesh.group(DATA)
            if group is not None:
                with communication("sum of live units"):
                    dist.all_reduce(votes, group=group)
            # Ranks of dp and cp agree by now: a share is the same of one copy and of several.
            dead = [(part == 0).sum() for part in votes.split([part.numel() for part in awake])]
            figures[places, 3] = torch.stack(dead).double().cpu()
            figures[places, 4] = torch.tensor([part.numel() for part in awake], dtype=torch.float64)
        return figures
