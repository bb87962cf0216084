"""What a block keeps for the backward pass, and what it computes again.

    none       all that autograd saves
    selective  all but what is cheap to make from the rest: norms and SwiGLU
    full       the block's input alone; the block runs again before its backward

Independent of that, what is kept may be kept in fewer bits (``packing.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mcp_parallel.model.formats import Compression
from mcp_parallel.model.packing import Packer, remember_recipe
from mcp_parallel.model.rerun import Rerun

Policy = Literal["none", "selective", "full"]


class _Forward(threading.local):
    """What the forward pass of this thread is in."""

    is_selective = False


_forward = _Forward()


def recomputable(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``function(*inputs)``, which selective checkpointing drops and makes again from ``inputs``.

    For what takes few operations an element and no communication. ``function`` must give the same
    bits each time, as one contiguous tensor that nothing writes to later.
    """
    out = function(*inputs)
    remember_if_recomputable(out, function, *inputs)
    return out


def remember_if_recomputable(out: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> None:
    """As ``recomputable``, where ``out`` came about otherwise with the bits of ``function``."""
    if _forward.is_selective:
        remember_recipe(out, function, inputs)


class Remat:
    """Runs a block's forward under an activation-checkpointing policy and a compression.

    Where both are "none" it is the plain call. The forward's result never depends on either.
    ``to_host`` sends what is kept to host memory until backward asks for it.
    """

    def __init__(self, policy: Policy = "none", compression: Compression = "none") -> None:
        self.policy: Policy = policy
        self.compression: Compression = compression
        self.to_host = False

    def __call__(
        self,
        function: Callable[[Tensor], Tensor],
        x: Tensor,
        parameters: Iterable[nn.Parameter] = (),
    ) -> Tensor:
        """``function(x)``, with less kept for backward.

        Args:
            function: the block.
            x: its input.
            parameters: those of the block: what outlives the step anyway is never packed.
        """
        packs = self.compression != "none" or self.to_host
        if (self.policy == "none" and not packs) or not torch.is_grad_enabled():
            return function(x)
        packer = Packer(self.compression, parameters, to_host=self.to_host)
        if self.policy == "full":
            return Rerun(function, x, packer).forward(x)
        with saved_tensors_hooks(packer.pack, packer.unpack):
            _forward.is_selective = self.policy == "selective"
            try:
                return function(x)
            finally:
                _forward.is_selective = False
