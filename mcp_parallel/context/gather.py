"""All-gather attention: every rank takes all keys and values once, and attends with its own rows.

Causal, each chunk of rows is one call of the kernel, over the keys up to its end; where every row
sees every key, all rows are one call. Backward gathers the keys
again, so that they don't wait for it in memory, and sums their gradients where each key lives.

Source: Llama 3 (2024), section 3.3.2. Cost: bytes as the ring's, in one collective that no work
hides; memory of all keys and values, and in backward of their gradients, on every rank.
Letters: as in ``block.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mcp_kernels.ops._comm import gather, scatter_sum_packed
from mcp_parallel.context.block import (
    Bounds,
    attend_block,
    attend_block_backward,
    results_of,
)
from mcp_parallel.context.split import Split


def _calls(
    split: Split, bounds: Sequence[Bounds], causal: bool
) -> Iterator[tuple[slice, slice, Bounds | None]]:
    """(rows of this rank, keys of the sequence, bounds) of each call."""
    if not causal:
        yield slice(None), slice(None), None
        return
    chunk = split.chunk_len
    for index, start in enumerate(split.starts):
        rows = slice(index * chunk, (index + 1) * chunk)
        if bounds:
            yield rows, slice(None), bounds[index]
        else:
            yield rows, slice(start + chunk), None


def gather_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    split: Split,
    group: dist.ProcessGroup,
    bounds: Sequence[Bounds] = (),
    *,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """This rank's rows of attention over the whole sequence; collective over ``group``.

    Arguments and results are those of ``ring.ring_forward``, ``bounds`` those of
    ``documents.gather_bounds``.
    """
    keys, values = (split.order(gather(t.contiguous(), group, 1)) for t in (k, v))
    outs, lses = zip(
        *(
            attend_block(q[:, rows], keys[:, seen], values[:, seen], causal=causal, bounds=of_chunk)
            for rows, seen, of_chunk in _calls(split, bounds, causal)
        ),
        strict=True,
    )
    return torch.cat(outs, 1), torch.cat(lses, 2)


def gather_backward(
    dout: Tensor,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    split: Split,
    group: dist.ProcessGroup,
    bounds: Sequence[Bounds] = (),
    *,
    causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) of ``gather_forward``; arguments are those of ``ring_backward``."""
    q, k, v, out, lse = saved
    results = results_of(dout, out, lse)
    keys, values = (split.order(gather(t.contiguous(), group, 1)) for t in (k, v))
    dk, dv = (torch.zeros_like(t, dtype=lse.dtype) for t in (keys, values))
    dqs = []
    for rows, seen, of_chunk in _calls(split, bounds, causal):
        dq, part_dk, part_dv = attend_block_backward(
            q[:, rows],
            keys[:, seen],
            values[:, seen],
            results.of_rows(rows),
            causal=causal,
            bounds=of_chunk,
        )
        dqs.append(dq)
        dk[:, seen] += part_dk
        dv[:, seen] += part_dv
    dk, dv = (scatter_sum_packed(split.pack(t), group) for t in (dk, dv))
    return torch.cat(dqs, 1), dk.to(k.dtype), dv.to(v.dtype)
