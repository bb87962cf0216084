"""Where the keys of a sequence lie in a paged cache.

A paged cache is ``[P, page size, N, D]``; row b of a block table names the page of each run of
``page size`` positions of sequence b. Entries past a sequence's end are never looked at: they may
hold anything.

Letters: P = pages, N = KV heads, D = head dim, B = sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcp_kernels._transforms import shared


def page_slots(op: str, table_row: Tensor, positions: range, page_size: int, pages: int) -> Tensor:
    """Slots ``page * page size + offset`` of some positions of one sequence, int64.

    Raises:
        ValueError: the table is too short, or names a page that is not there.
    """
    if positions.stop > table_row.numel() * page_size:
        raise ValueError(
            f"{op}: block_table must have pages for {positions.stop} positions, got "
            f"{table_row.numel()} pages of {page_size}"
        )
    if len(positions) == 0:
        return torch.empty(0, dtype=torch.int64, device=table_row.device)
    at = torch.arange(positions.start, positions.stop, device=table_row.device)
    page = table_row.to(torch.int64)[at // page_size]
    low, high = int(page.min()), int(page.max())
    if low < 0 or high >= pages:
        raise ValueError(
            f"{op}: block_table must name pages in [0, {pages - 1}], got {low if low < 0 else high}"
        )
    return page * page_size + at % page_size


def gather_pages(op: str, cache: Tensor, block_table: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """The keys (or values) of all sequences laid end to end, ``[Tk, N, D]``; differentiable.

    Raises:
        ValueError: a shape does not fit, or the table names a page that is not there.
    """
    if cache.dim() != 4 or block_table.dim() != 2:
        raise ValueError(
            f"{op}: with block_table, k and v must be [P, page size, N, D] and block_table "
            f"[B, max pages], got {list(cache.shape)} and {list(block_table.shape)}"
        )
    pages, page_size = cache.shape[:2]
    if torch.compiler.is_compiling():
        slot = _slots_in_graph(block_table, cu_seqlens_k, page_size)
        return cache[slot // page_size, slot % page_size]
    way_out = "give every sample its own pages of one cache, or call in a loop"
    bounds = shared(op, "cu_seqlens_k", cu_seqlens_k, way_out).tolist()
    block_table = shared(op, "block_table", block_table, way_out)
    slots = [
        page_slots(op, row, range(stop - start), page_size, pages)
        for row, start, stop in zip(block_table, bounds[:-1], bounds[1:], strict=True)
    ]
    slot = torch.cat(slots) if slots else block_table.new_empty(0, dtype=torch.int64)
    return cache[slot // page_size, slot % page_size]


def _slots_in_graph(block_table: Tensor, cu_seqlens_k: Tensor, page_size: int) -> Tensor:
    """Slots of as many keys as the table could name, for a graph that reads no length.

    What lies past the last sequence is slack: a copy of the cache's first slot, attended by none.
    An entry that is read and names no page is an index out of range.
    """
    capacity = block_table.shape[0] * block_table.shape[1] * page_size
    key = torch.arange(capacity, device=block_table.device)
    ends = cu_seqlens_k.to(torch.int64)
    is_key = key < ends[-1]
    key = torch.where(is_key, key, 0)
    sequence = torch.searchsorted(ends, key, right=True) - 1
    position = key - ends[sequence]
    is_key = is_key & (sequence < block_table.shape[0])  # no sequence has a key
    sequence = torch.where(is_key, sequence, 0)
    column = torch.where(is_key, position // page_size, 0)
    page = torch.where(is_key, block_table.to(torch.int64)[sequence, column], 0)
    return page * page_size + torch.where(is_key, position % page_size, 0)
