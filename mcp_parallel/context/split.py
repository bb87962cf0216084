"""How a sequence is cut over the ranks that share it, so that causal attention costs each the same.

The sequence is 2 cp chunks of equal length, and rank r holds chunks r and 2 cp - 1 - r: an early
one, whose rows see few keys, and a late one, whose rows see many. Every rank then has the same
number of (row, key) pairs to work on, with each block of another rank's keys too.

Source: Llama 3 (2024), section 3.3.2, and Brandon et al., "Striped Attention" (2023), for why.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Split:
    """One rank's part of a sequence.

    Args:
        ranks: that share the sequence.
        rank: this one's index among them.
        seq_len: positions of the whole sequence, a multiple of ``2 * ranks``.
    """

    ranks: int
    rank: int
    seq_len: int

    def __post_init__(self) -> None:
        if self.seq_len % (2 * self.ranks):
            raise ValueError(
                f"Split: seq_len must be a multiple of 2 * ranks = {2 * self.ranks}, got "
                f"{self.seq_len}; pad the sequence or use fewer ranks"
            )

    @property
    def chunk_len(self) -> int:
        """Positions of a chunk; a rank holds two."""
        return self.seq_len // (2 * self.ranks)

    @property
    def starts(self) -> tuple[int, int]:
        """First positions of this rank's two chunks, the early one and the late one."""
        return self.starts_of(self.rank)

    def starts_of(self, rank: int) -> tuple[int, int]:
        """First positions of the two chunks of ``rank``."""
        return rank * self.chunk_len, (2 * self.ranks - 1 - rank) * self.chunk_len

    def take(self, whole: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of ``whole`` along ``dim``, early chunk first; a copy."""
        parts = [whole.narrow(dim, start, self.chunk_len) for start in self.starts]
        return torch.cat(parts, dim)

    def order(self, gathered: Tensor) -> Tensor:
        """Parts ``[B, cp * 2 chunk, ...]`` in the order of ranks, in that of the sequence."""
        parts = gathered.unflatten(1, (self.ranks, 2, self.chunk_len))
        early, late = parts[:, :, 0], parts[:, :, 1].flip(1)
        return torch.cat([early, late], 1).flatten(1, 2)

    def pack(self, whole: Tensor) -> Tensor:
        """A sequence ``[B, S, ...]`` as contiguous parts ``[cp, B, 2 chunk, ...]``."""
        chunks = whole.unflatten(1, (2 * self.ranks, self.chunk_len))
        early, late = chunks[:, : self.ranks], chunks[:, self.ranks :].flip(1)
        parts = torch.stack([early, late], 2).flatten(2, 3)  # [B, cp, 2 chunk, ...]
        return parts.movedim(1, 0).contiguous()
