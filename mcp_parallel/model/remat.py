"""Activation checkpointing of one block: what is kept in forward, what is computed again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Policy = Literal["none", "selective", "full"]

# Selective keeps the results that are dear to make again: attention, and every matmul, with its
# communication where it has one. Norms, rotations and SwiGLU are cheap and computed again.
_KEPT = {
    "mcp_kernels::flash_attn",
    "mcp_kernels::all_gather_matmul",
    "mcp_kernels::matmul_all_reduce",
    "mcp_kernels::matmul_reduce_scatter",
    "aten::mm",
    "aten::addmm",
    "aten::linear",
}


def _keep(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    kept = getattr(op, "_schema", None) is not None and op._schema.name in _KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Remat:
    """Runs a function under an activation-checkpointing policy; "none" runs it as it is."""

    def __init__(self, policy: Policy = "none") -> None:
        self.policy: Policy = policy

    def __call__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """``function(x)``, with fewer activations kept for backward."""
        if self.policy == "none" or not torch.is_grad_enabled():
            return function(x)
        # No dropout anywhere in the model, so no random state needs to be carried.
        if self.policy == "full":
            return checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)
        return checkpoint(
            function,
            x,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(create_selective_checkpoint_contexts, _keep),
        )
