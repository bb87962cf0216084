"""How the attention reference cuts its work: blocks whose scores stay in cache.

A chunk is some batch entries times some KV heads, a block is some query rows of a chunk and the
keys they can see. Where the inputs hold NaN or infinity and something is hidden, a block is one row
of one head with exactly its visible keys: nothing hidden then takes part in any sum.

Letters: B = batch, H = query heads, N = KV heads, G = H / N, D = head dim of q and k, E = of v.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mcp_kernels.ops.attention_mask import AttentionOptions, visible_keys, visible_mask

# Rows of one score matrix: enough for the matmuls, few enough that causal skips what it can.
_ROWS = 64
# Scores of a block: 512 KiB of float32, so that the passes over them run from a core's L2.
_SCORES = 1 << 17


@dataclass(frozen=True, slots=True)
class Chunk:
    """Batch entries and KV heads that are computed together."""

    batch: slice
    kv_heads: slice
    heads: slice
    """The query heads of ``kv_heads``."""


@dataclass(frozen=True, slots=True)
class Block:
    """Query rows of a chunk and the keys they are held against."""

    rows: range
    keys: range | Tensor
    """A range is cut further by the window; a tensor holds just the keys that are seen."""

    @property
    def row_slice(self) -> slice:
        """``rows`` as an index into the row dimension."""
        return slice(self.rows.start, self.rows.stop)

    @property
    def key_index(self) -> slice | Tensor:
        """``keys`` as an index into the key dimension."""
        if isinstance(self.keys, range):
            return slice(self.keys.start, self.keys.stop)
        return self.keys

    def key_positions(self, device: torch.device) -> Tensor:
        """``keys`` as int64 positions."""
        if isinstance(self.keys, range):
            return torch.arange(self.keys.start, self.keys.stop, device=device)
        return self.keys

    def row_positions(self, device: torch.device) -> Tensor:
        """``rows`` as int64 positions."""
        return torch.arange(self.rows.start, self.rows.stop, device=device)


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of one attention call and how it is cut."""

    batch: int
    num_rows: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    options: AttentionOptions
    is_isolated: bool
    """Inputs are not finite and something is hidden: one row of one head at a time."""

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // max(1, self.num_kv_heads)

    @property
    def offset(self) -> int:
        """Key on the diagonal of row 0."""
        return self.options.offset(self.num_rows, self.num_keys)

    def rows_per_block(self) -> int:
        """Query rows of a block."""
        return 1 if self.is_isolated else max(16, min(self.num_rows, _ROWS // self.group))

    def chunks(self) -> Iterator[Chunk]:
        """All chunks, batch by batch; several heads, or whole batches, where they are small."""
        if self.is_isolated:
            for b in range(self.batch):
                for h in range(self.num_heads):
                    n = h // self.group
                    yield Chunk(slice(b, b + 1), slice(n, n + 1), slice(h, h + 1))
            return
        per_head = self.group * self.rows_per_block() * max(1, self.num_keys)
        heads = max(1, min(self.num_kv_heads, _SCORES // per_head))
        batches = max(1, _SCORES // (per_head * heads)) if heads == self.num_kv_heads else 1
        for b in range(0, self.batch, batches):
            for n in range(0, self.num_kv_heads, heads):
                stop = min(n + heads, self.num_kv_heads)
                yield Chunk(
                    slice(b, min(b + batches, self.batch)),
                    slice(n, stop),
                    slice(n * self.group, stop * self.group),
                )

    def blocks(self, chunk: Chunk, bias: Tensor | None) -> Iterator[Block]:
        """All blocks of a chunk, top to bottom; ``bias`` is ``[B, H, Sq, Sk]`` or None."""
        if self.is_isolated:
            yield from self._isolated_blocks(chunk, bias)
            return
        step = self.rows_per_block()
        for start in range(0, self.num_rows, step):
            rows = range(start, min(start + step, self.num_rows))
            yield Block(rows, visible_keys(self.options, rows, self.offset, self.num_keys))

    def _isolated_blocks(self, chunk: Chunk, bias: Tensor | None) -> Iterator[Block]:
        device = torch.device("cpu") if bias is None else bias.device
        visible = visible_mask(self.options, self.num_rows, self.num_keys, device)
        if bias is not None:
            here = bias[chunk.batch, chunk.heads].reshape(self.num_rows, self.num_keys)
            visible &= here if here.dtype == torch.bool else here != float("-inf")
        for row in range(self.num_rows):
            yield Block(range(row, row + 1), visible[row].nonzero().view(-1))
