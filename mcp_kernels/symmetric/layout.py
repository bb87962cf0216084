"""What lies where in a symmetric buffer, and how work is cut so that it always fits: plain numbers.

    words   epoch, ticket, dead: a 128-byte line each
    flags   [2 parities][rows][W] of 64 bits
    slots   2 x slot_bytes, what peers read

The same on every rank. Sizes are fixed when a buffer is made; larger inputs go in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

HEAD_BYTES = 512
FLAG_BYTES = 8
SLOT_ALIGN = 4096
# csrc/cuda/symmetric.cuh: kPhases * kMaxBlocks rows of flags.
CUDA_MAX_BLOCKS = 32
CUDA_ROWS = 2 * CUDA_MAX_BLOCKS


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of one rank's buffer."""

    world: int
    num_rows: int
    """Rows of flags in each parity."""
    slot_bytes: int
    """A multiple of 16."""

    def __post_init__(self) -> None:
        if self.world < 1 or self.num_rows < 2 or self.slot_bytes < 16 or self.slot_bytes % 16:
            raise ValueError(
                "Layout: world must be >= 1, num_rows >= 2 and slot_bytes a positive multiple of "
                f"16, got {self.world}, {self.num_rows} and {self.slot_bytes}"
            )

    @property
    def slots_at(self) -> int:
        """Byte at which the first slot starts."""
        end = HEAD_BYTES + 2 * self.num_rows * self.world * FLAG_BYTES
        return -(-end // SLOT_ALIGN) * SLOT_ALIGN

    @property
    def buffer_bytes(self) -> int:
        """Bytes of a whole buffer."""
        return self.slots_at + 2 * self.slot_bytes


def windows(size: int, most: int) -> Iterator[tuple[int, int]]:
    """``(start, length)`` of the pieces of ``size``, each of at most ``most``; one where it is 0.

    A call with nothing to do still runs once: its peers wait for its greeting.
    """
    yield 0, min(size, most)
    for start in range(most, size, most):
        yield start, min(most, size - start)


@dataclass(frozen=True, slots=True)
class Missed:
    """What an error word says."""

    rank: int
    """Who did not come."""
    epoch: int
    """Number of the call, counted from 1."""


def read_error(word: int) -> Missed | None:
    """The meaning of an error word (a signed 64-bit value); None for 0."""
    word &= (1 << 64) - 1
    if word == 0:
        return None
    return Missed(rank=(word >> 40) & 0xFFFF, epoch=word & 0xFFFFFFFFFF)
