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
    way_out = "give every sample its own pages of one cache, or call in a loop"
    bounds = shared(op, "cu_seqlens_k", cu_seqlens_k, way_out).tolist()
    block_table = shared(op, "block_table", block_table, way_out)
    slots = [
        page_slots(op, row, range(stop - start), page_size, pages)
        for row, start, stop in zip(block_table, bounds[:-1], bounds[1:], strict=True)
    ]
    slot = torch.cat(slots) if slots else block_table.new_empty(0, dtype=torch.int64)
    return cache[slot // page_size, slot % page_size]
