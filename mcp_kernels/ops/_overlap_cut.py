"""How a matmul over ranks is cut so that its communication runs under its products: plain numbers.

All that is decided here follows from what every rank has alike: the shape that is summed or
gathered, its type, the ranks, the backend. Never from this rank's own features or strides.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

# Bytes of a piece below which an exchange of its own costs more than it hides: gloo takes a quarter
# of a millisecond for any, NCCL tens of microseconds and has the faster links.
PIECE_BYTES = 1 << 20
# More pieces hide more of the last one; four leave a quarter of the communication in the open.
MOST_PIECES = 4
# Rows, and columns, from which a product of its own costs a few percent at most (see _fused).
MIN_ROWS = 512
MIN_COLUMNS = 512


class Cut(NamedTuple):
    """A product in pieces, by rows or by columns."""

    by_rows: bool
    steps: tuple[tuple[int, int], ...]
    """(first, count) of each piece."""


def cut_product(rows: int, columns: int, num_bytes: int) -> Cut | None:
    """Pieces of a product; None where it is too small for two.

    Args:
        rows: of one matmul.
        columns: out features.
        num_bytes: of all that is communicated.
    """
    most = min(MOST_PIECES, num_bytes // PIECE_BYTES)
    by_rows, by_columns = min(most, rows // MIN_ROWS), min(most, columns // MIN_COLUMNS)
    if max(by_rows, by_columns) < 2:
        return None
    if by_rows >= by_columns:  # rows stand in the result where they are summed: nothing is copied
        return Cut(True, steps_of(rows, by_rows))
    return Cut(False, steps_of(columns, by_columns))


def steps_of(size: int, count: int) -> tuple[tuple[int, int], ...]:
    """``size`` in ``count`` nearly equal pieces, ``(first, count)`` each."""
    bounds = [size * index // count for index in range(count + 1)]
    return tuple((a, b - a) for a, b in itertools.pairwise(bounds))


def cut_gather(shape: Sequence[int], dim: int, itemsize: int) -> tuple[tuple[int, int], ...] | None:
    """Pieces of each rank's part ``shape`` along ``dim``; None where it is too small for one."""
    part = shape[dim]
    row_group = torch.Size(shape[dim + 1 : -1]).numel()
    num_bytes = torch.Size(shape).numel() * itemsize
    most = min(MOST_PIECES, num_bytes // PIECE_BYTES, part * row_group // MIN_ROWS)
    return steps_of(part, most) if most >= 1 else None
