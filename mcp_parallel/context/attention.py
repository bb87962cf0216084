"""Attention over a sequence that a group of ranks shares, as one differentiable call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcp_kernels.saved import keep_exact
from mcp_parallel.config import CpAttention
from mcp_parallel.context.block import Bounds
from mcp_parallel.context.documents import NOTHING, RingDocuments, gather_bounds, ring_documents
from mcp_parallel.context.gather import gather_backward, gather_forward
from mcp_parallel.context.ring import ring_backward, ring_forward
from mcp_parallel.context.split import Split

_FORWARD = {"ring": ring_forward, "all_gather": gather_forward}
_BACKWARD = {"ring": ring_backward, "all_gather": gather_backward}
Plan = Sequence[Bounds] | RingDocuments
"""What each kind takes of documents; an empty one is none."""


class ContextAttention:
    """Grouped-query attention of this rank's rows over the whole sequence.

    Args:
        split: this rank's part of the sequence.
        group: the ranks that share it, in the order of their parts.
        kind: how keys and values travel.
        causal: a row sees no later key; documents are of causal attention alone.
    """

    def __init__(
        self, split: Split, group: dist.ProcessGroup, kind: CpAttention, *, causal: bool = True
    ) -> None:
        self.split, self.group, self.kind, self.causal = split, group, kind, causal

    @property
    def starts(self) -> tuple[int, ...]:
        """Positions of the first row of each of this rank's equal chunks."""
        return self.split.starts

    def plan(self, documents: Tensor, device: torch.device) -> Plan:
        """Who meets whom where attention stays within documents.

        Args:
            documents: ``[B, S]`` int64 of the whole sequence: where each position's begins.
            device: of the activations.
        """
        documents = documents.cpu()
        if self.kind == "all_gather":
            return [_to(device, bounds) for bounds in gather_bounds(documents, self.split)]
        found = ring_documents(documents, self.split)
        # NOTHING stays where it is: it is known by being that very object.
        bounds = [b if b is NOTHING else _to(device, b) for b in found.bounds]
        return found._replace(bounds=bounds)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, documents: Plan = ()) -> Tensor:
        """Attend; collective over the group, forward and backward.

        Args:
            q: ``[B, S / ranks, H, K]``, this rank's part (``Split.take``).
            k: ``[B, S / ranks, N, K]``.
            v: as k.
            documents: what ``plan`` made, or nothing.

        Returns:
            ``[B, S / ranks, H, K]``, of q's dtype.
        """
        return _ContextAttention.apply(q, k, v, self, documents)  # pyright: ignore[reportReturnType]


def _to(device: torch.device, bounds: Bounds) -> Bounds:
    return Bounds(*(t.to(device) for t in bounds))


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention: ContextAttention,
        documents: Any,
    ) -> Tensor:
        run = _FORWARD[attention.kind]
        out, lse = run(
            q, k, v, attention.split, attention.group, documents, causal=attention.causal
        )
        keep_exact(lse)
        ctx.attention, ctx.documents = attention, documents
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        attention: ContextAttention = ctx.attention
        run = _BACKWARD[attention.kind]
        dq, dk, dv = run(
            grads[0],
            ctx.saved_tensors,
            attention.split,
            attention.group,
            ctx.documents,
            causal=attention.causal,
        )
        return dq, dk, dv, None, None
