"""Parameters as parts of a flat buffer of blocks, and the part of it that a rank updates.

Letters: P = padded elements of the flat buffer, S = elements of this rank's span: P, or P / W where
the state is sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mcp_kernels.ops.block_layout import BlockLayout


@dataclass(frozen=True, slots=True)
class Segment:
    """What a rank updates of one parameter: a run of its elements."""

    index: int
    """Of the parameter in its bucket."""
    start: int
    """First element, in the parameter."""
    stop: int
    """After the last element."""
    at: int
    """Place of the first element in the span."""


@dataclass(frozen=True)
class FlatParams:
    """Parameters of one dtype and device in one flat buffer, in blocks.

    Args:
        params: in the order of the buffer; those of one parameter group lie together.
        names: one a parameter.
        groups: index of each parameter's group.
        layout: of ``params``; its world size is the number of chunks.
        rank: whose span this is.
        is_sharded: a span is this rank's chunk; otherwise all of the buffer.
    """

    params: list[Tensor]
    names: list[str]
    groups: list[int]
    layout: BlockLayout
    rank: int
    is_sharded: bool

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return self.params[0].dtype

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return self.params[0].device

    @property
    def state_dtype(self) -> torch.dtype:
        """Of moments and master weights: float32, or float64 for float64 parameters."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def has_master(self) -> bool:
        """Whether updates go to master weights first: sharded, or parameters in 16 bits."""
        return self.is_sharded or self.dtype != self.state_dtype

    @property
    def span(self) -> tuple[int, int]:
        """First element of this rank's span in the buffer, and the one after its last."""
        if not self.is_sharded:
            return 0, self.layout.padded_numel
        chunk = self.layout.chunk_numel
        return self.rank * chunk, (self.rank + 1) * chunk

    @cached_property
    def segments(self) -> list[Segment]:
        """The parameters' parts in this rank's span, in order; each starts at a block."""
        start, stop = self.span
        found = []
        for index, (offset, size) in enumerate(
            zip(self.layout.offsets, self.layout.sizes, strict=True)
        ):
            first, last = max(start, offset), min(stop, offset + size)
            if first < last:
                found.append(Segment(index, first - offset, last - offset, first - start))
        return found

    @cached_property
    def group_runs(self) -> list[tuple[int, list[Segment], int, int]]:
        """(group, its segments, first and last + 1 element of its blocks in the span)."""
        runs: list[tuple[int, list[Segment], int, int]] = []
        block = self.layout.block_size
        for segment in self.segments:
            group = self.groups[segment.index]
            stop = segment.at + -(-(segment.stop - segment.start) // block) * block
            if runs and runs[-1][0] == group:
                _, members, first, _ = runs[-1]
                runs[-1] = (group, [*members, segment], first, stop)
            else:
                runs.append((group, [segment], segment.at, stop))
        return runs

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of whole parameters into a buffer of P elements, in the parameters' shapes."""
        return [
            flat[offset : offset + p.numel()].view(p.shape)
            for offset, p in zip(self.layout.offsets, self.params, strict=True)
        ]

    def span_views(self, flat: Tensor) -> list[Tensor]:
        """1-D views of the segments into a buffer of S elements."""
        return [flat[s.at : s.at + s.stop - s.start] for s in self.segments]

    def fill_span(self, flat: Tensor, tensors: Sequence[Tensor | None]) -> None:
        """Copy the segments of tensors shaped like the parameters into S elements; None is zero."""
        for segment, view in zip(self.segments, self.span_views(flat), strict=True):
            tensor = tensors[segment.index]
            if tensor is None:
                view.zero_()
            else:
                view.copy_(tensor.detach().reshape(-1)[segment.start : segment.stop])

    def load_params(self, flat: Tensor) -> None:
        """Give every parameter its values from a buffer of P elements."""
        torch._foreach_copy_(self.params, self.views(flat))
