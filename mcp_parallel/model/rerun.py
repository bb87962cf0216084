"""Full checkpointing of a block: keep its input, run it again when backward first needs it.

As ``torch.utils.checkpoint``, and right for a backward that comes in two passes: what the pass over
inputs makes again stays for the pass over weights, which asks for it in many small steps. torch's
runs the block again in each of these, and keeps every copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mcp_parallel.model.packing import Packer


class _AllMadeError(Exception):
    """The last tensor that backward needs was made: what follows is for nothing."""


class _Place:
    """Which of a run's saved tensors an operation waits for."""

    __slots__ = ("index", "rerun")

    def __init__(self, rerun: Rerun, index: int) -> None:
        self.rerun, self.index = rerun, index


class Rerun:
    """One forward pass of one block.

    Args:
        function: the block; it must do the same each time.
        x: its input.
        packer: how the input is kept, and which tensors are nobody's to drop.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor, packer: Packer) -> None:
        self._function, self._packer = function, packer
        self._x = packer.pack(x)
        self._needs_grad, self._is_leaf = x.requires_grad, x.is_leaf
        self._count = 0
        self._made: list[Tensor | None] = []

    def forward(self, x: Tensor) -> Tensor:
        """The block's result; keeps nothing but ``x``."""
        with saved_tensors_hooks(self._pack, _unpack):
            return self._function(x)

    def _pack(self, tensor: Tensor) -> Tensor | _Place:
        if self._packer.is_kept_anyway(tensor):
            return tensor
        self._count += 1
        return _Place(self, self._count - 1)

    def get(self, index: int) -> Tensor:
        """The saved tensor number ``index``; from a pass that keeps the graph it stays."""
        made = self._made[index] if self._made else None
        if made is None:
            self._run()
            made = self._made[index]
            assert made is not None
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]
        if not keeps:
            self._made[index] = None
        return made

    def _run(self) -> None:
        self._made = []
        with torch.enable_grad(), saved_tensors_hooks(self._collect, _never):
            x = self._packer.unpack(self._x).detach().requires_grad_(self._needs_grad)
            x = x if self._is_leaf else x.view_as(x)  # the packer tells leaves from the rest
            try:
                self._function(x)
            except _AllMadeError:
                return
        raise RuntimeError(
            "Rerun: function must save the same tensors each time, got "
            f"{len(self._made)} in place of {self._count}"
        )

    def _collect(self, tensor: Tensor) -> Any:
        if self._packer.is_kept_anyway(tensor):
            return None
        self._made.append(tensor.detach())
        if len(self._made) == self._count:
            raise _AllMadeError
        return None


def _unpack(saved: Tensor | _Place) -> Tensor:
    return saved.rerun.get(saved.index) if isinstance(saved, _Place) else saved


def _never(saved: Any) -> Tensor:
    raise AssertionError("the graph of a second run is dropped, not walked")
