"""Attention as a block calls it: over the whole sequence here, over a shared one elsewhere.

Attention may stay within documents: a row then sees the keys of its own document alone. Positions
go on through them, as in Llama 3: rotary attention depends on distances, and within a document
these are the same.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from mcp_kernels import flash_attn_func, flash_attn_varlen_func
from mcp_parallel.context.documents import triangle_bounds


class Attend(Protocol):
    """Grouped-query attention of the rows that a rank holds."""

    @property
    def starts(self) -> tuple[int, ...]:
        """Position of the first row of each of the equal chunks that the rows are."""
        ...

    def plan(self, documents: Tensor, device: torch.device) -> Any:
        """What ``__call__`` takes of documents; made once for all blocks.

        Args:
            documents: ``[B, S]`` int64 of the whole sequence: where each position's begins. On the
                CPU it costs no wait for a GPU.
            device: of the activations.
        """
        ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, documents: Any = ()) -> Tensor:
        """``[B, S', H, K]`` and twice ``[B, S', N, K]`` to ``[B, S', H, K]``."""
        ...


class WholeSequence:
    """This rank holds all rows and keys of its sequences.

    Args:
        causal: a row sees no later key. Documents are of causal attention alone.
    """

    starts = (0,)

    def __init__(self, *, causal: bool = True) -> None:
        self.causal = causal

    def plan(self, documents: Tensor, device: torch.device) -> tuple[Tensor, ...]:
        """Where documents end, in the batch laid end to end."""
        return (triangle_bounds(documents.cpu()).rows.to(device),)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, documents: tuple[Tensor, ...] = ()
    ) -> Tensor:
        """Attend over each sequence, or over each document."""
        if not documents:
            return flash_attn_func(q, k, v, causal=self.causal)
        [ends] = documents
        flat = [t.flatten(0, 1) for t in (q, k, v)]
        out = flash_attn_varlen_func(
            flat[0], flat[1], flat[2], ends, ends, q.shape[1], q.shape[1], causal=True
        )
        return out.unflatten(0, q.shape[:2])
