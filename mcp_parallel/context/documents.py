"""Which rows meet which keys where attention stays within documents.

``documents`` says for every position of a sequence where its document begins. A row sees the keys
from there up to itself. Of a block of earlier keys that leaves one rectangle: whoever sees one of
them belongs to the document that the block's first row is in, and sees all of the block's keys from
where that document began. On the diagonal it leaves a triangle for each document.

All of this is small integers, made once a micro-batch, on the CPU.
Letters: B = batch, S = positions of the whole sequence, c = positions of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mcp_parallel.context.block import Bounds
from mcp_parallel.context.split import Split

NOTHING = Bounds(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
"""No row of the block sees a key of it."""


class RingDocuments(NamedTuple):
    """Who meets whom on the ring, and so which blocks need not travel."""

    bounds: list[Bounds]
    """Of each step: this rank's rows against the keys of the rank so many places before it."""
    is_wanted: list[bool]
    """Of each step: the rank so many places after this one has rows that see its keys."""


def ring_documents(documents: Tensor, split: Split) -> RingDocuments:
    """``RingDocuments`` of the rank of ``split``; all ranks make theirs of the same documents."""
    is_wanted = [True]
    for step in range(1, split.ranks):
        receiver = Split(split.ranks, (split.rank + step) % split.ranks, split.seq_len)
        is_wanted.append(_step_bounds(documents, receiver, step) is not NOTHING)
    return RingDocuments(ring_bounds(documents, split), is_wanted)


def triangle_bounds(documents: Tensor) -> Bounds:
    """Rows and keys are the same positions.

    Args:
        documents: ``[B, S]`` int, where each position's document begins: in any numbering that
            tells neighbouring documents apart.
    """
    is_first = torch.ones(documents.shape, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    [starts] = is_first.flatten().nonzero(as_tuple=True)
    bounds = torch.cat([starts, torch.tensor([documents.numel()])])
    return Bounds(bounds, bounds)


def ring_bounds(documents: Tensor, split: Split) -> list[Bounds]:
    """For each step of the ring, this rank's rows against the keys that it then holds.

    Args:
        documents: ``[B, S]`` int64, in positions of the sequence.
        split: this rank's.
    """
    others = (_step_bounds(documents, split, step) for step in range(1, split.ranks))
    return [triangle_bounds(split.take(documents)), *others]


def _step_bounds(documents: Tensor, split: Split, step: int) -> Bounds:
    """The rows of a rank against the keys of the rank ``step`` places before it, step > 0."""
    mine = split.take(documents)  # [B, 2 c]
    chunk = split.chunk_len
    source = (split.rank - step) % split.ranks
    early, late = split.starts_of(source)
    is_earlier = source < split.rank
    first_row = 0 if is_earlier else chunk
    begin = mine[:, first_row]  # [B], of the document that may reach back into the block
    rows = (mine[:, first_row:] == begin[:, None]).sum(1)
    keys = (early + chunk - begin).clamp(0, chunk)
    if not is_earlier:
        keys = keys + (late + chunk - begin).clamp(0, chunk)
    last_key = chunk if is_earlier else 2 * chunk
    return _rectangles(first_row, rows, last_key, keys, 2 * chunk)


def _rectangles(first_row: int, rows: Tensor, last_key: int, keys: Tensor, length: int) -> Bounds:
    """Rows ``first_row ..`` of sample b, ``rows[b]`` of them, meet the ``keys[b]`` before last_key.

    Rows and keys of a sample are ``length`` each; those outside are sequences of one side alone.
    """
    if not keys.any():
        return NOTHING
    zero, end = torch.zeros_like(rows), torch.full_like(rows, length)
    first, last = torch.full_like(rows, first_row), torch.full_like(rows, last_key)
    # In each sample: keys before, rows before, the rectangle, keys after, rows after.
    row_ends = torch.stack([zero, first, first + rows, first + rows, end], 1)
    key_ends = torch.stack([last - keys, last - keys, last, end, end], 1)
    offset = torch.arange(len(rows))[:, None] * length
    return Bounds(*(_from_zero((ends + offset).flatten()) for ends in (row_ends, key_ends)))


def gather_bounds(documents: Tensor, split: Split) -> list[Bounds]:
    """For each of this rank's two chunks, its rows against all keys of the sequence.

    Args:
        documents: ``[B, S]`` int64, in positions of the sequence.
        split: this rank's.
    """
    return [_rows_in_sequence(documents, start, split.chunk_len) for start in split.starts]


def _rows_in_sequence(documents: Tensor, start: int, chunk: int) -> Bounds:
    """Rows ``start .. start + chunk`` of each sample against all of its keys.

    A document's rows meet its keys up to the last of these rows: a triangle whose end is aligned,
    with a rectangle before it where the document began before the chunk.
    """
    row_ends, key_ends = [], []
    length = documents.shape[1]
    for sample, mine in enumerate(documents[:, start : start + chunk]):
        [changes] = (mine[1:] != mine[:-1]).nonzero(as_tuple=True)
        ends = torch.cat([changes + 1, torch.tensor([chunk])])
        # Keys before the first document are nobody's, nor are those after the chunk.
        row_ends.append(torch.cat([torch.tensor([0]), ends, ends[-1:]]) + sample * chunk)
        keys = torch.cat([mine[:1], start + ends, torch.tensor([length])])
        key_ends.append(keys + sample * length)
    return Bounds(_from_zero(torch.cat(row_ends)), _from_zero(torch.cat(key_ends)))


def _from_zero(ends: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), ends])
