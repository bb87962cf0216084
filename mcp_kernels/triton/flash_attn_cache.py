"""Where the keys of a cached call lie, and how new ones are written there: no host reads a length.

Letters: B = batch, Sn = new keys, N = KV heads, D = head dim of q and k, E = of v, R = rotated
dims.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mcp_kernels.ops.rotary import rotate


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys ``starts .. lengths`` of each batch entry in ``[entries, capacity, N, D]``."""

    lengths: Tensor
    """``[B]`` int, where the keys end."""
    entries: Tensor | None
    """``[B]`` int, the cache row of each batch entry; None: its own."""
    starts: Tensor | None
    """``[B]`` int, where the keys begin; None: 0."""
    table: Tensor | None
    """``[B, pages]`` int: the cache's rows are pages, found here."""
    capacity: int
    """Keys that an entry can have."""


def full_cache(batch: int, num_keys: int, device: torch.device) -> Cache:
    """K and V of a plain call, as a cache that is full."""
    lengths = torch.full((batch,), num_keys, dtype=torch.int32, device=device)
    return Cache(lengths, None, None, None, num_keys)


def append(
    caches: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    lengths: Tensor,
    entries: Tensor | None,
    table: Tensor | None,
) -> None:
    """Write the new keys and values ``[B, Sn, N, D or E]`` behind ``lengths``, in place.

    A place outside the cache is an index out of range of torch's own: on a GPU it stops the process
    with a device-side assertion.
    """
    batch, num_new = new[0].shape[:2]
    at = lengths.long()[:, None] + torch.arange(num_new, device=lengths.device)
    if table is not None:
        page_size = caches[0].shape[1]
        place = table.long().gather(1, at // page_size)
        at = at % page_size
    else:
        own = torch.arange(batch, device=lengths.device) if entries is None else entries.long()
        place = own[:, None].expand_as(at)
    for cache, values in zip(caches, new, strict=True):
        cache.index_put_((place, at), values)


def rotate_at(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """``rotate`` with positions ``[B, S or 1]`` of each batch entry's own, on the device."""
    batch, rows, heads, head_dim = x.shape
    at = positions.expand(batch, rows).reshape(-1)
    flat = x.reshape(1, batch * rows, heads, head_dim)
    return rotate(flat, cos[at], sin[at], range(batch * rows), interleaved).view(x.shape)
