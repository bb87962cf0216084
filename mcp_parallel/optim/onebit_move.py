"""1-bit Adam's state at another layout than it was saved at; nothing that errors hold is lost.

- Another dp: every rank goes on with the mean of the worker errors, the server's are cut anew.
- Another tp or pp: blocks are cut anew, and what the momentum's new codes lose joins the errors.
- A tied embedding is compressed on one pipeline stage and not on two: its preconditioner becomes a
  second moment again and its errors join its momentum, which is of plain gradients again, or the
  other way round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcp_kernels.ops.onebit_compress_momentum import onebit_compress_momentum
from mcp_kernels.optim._adam_bucket import AdamBucket, Mask
from mcp_parallel.optim.adamw import MOMENTS

Flats = dict[str, Tensor]
"""Whole flat tensors of a bucket by what they are; worker errors in one row, or one a rank."""


def new_preconditioner(bucket: AdamBucket) -> Tensor:
    """A buffer for the factors of a bucket: none of its padding is masked."""
    return bucket.new_buffer(bucket.layout.padded_numel, torch.bfloat16).fill_(1)


def load_moments(bucket: AdamBucket, flats: Flats) -> None:
    """Stage 1."""
    bucket.preconditioner = bucket.moves = bucket.bits = bucket.scales = None
    bucket.worker_error = bucket.server_error = None
    for kind in MOMENTS:
        setattr(bucket, kind, _own_span(bucket, flats[kind]))


def load_frozen(bucket: AdamBucket, flats: Flats, *, has_codes: bool) -> None:
    """Stage 2: preconditioner and errors as they were, the momentum coded again if it was."""
    layout = bucket.layout
    bucket.exp_avg_sq = None
    bucket.precondition_by(flats["preconditioner"])
    bucket.make_codes(_mean_error(bucket, flats))
    assert bucket.bits is not None
    assert bucket.scales is not None
    assert bucket.worker_error is not None
    if bucket.group is None:
        bucket.worker_error += flats["server_error"]  # alone there is no server
    else:
        start = bucket.group.rank() * layout.chunk_numel
        bucket.server_error = flats["server_error"][start : start + layout.chunk_numel].clone()
    bucket.exp_avg = flats["exp_avg"]
    if has_codes:
        lost = bucket.new_buffer(layout.padded_numel)
        bucket.bits, bucket.scales = onebit_compress_momentum(
            bucket.flat.views(flats["exp_avg"]),
            *(bucket.bits, bucket.scales, lost),
            beta1=0.0,
            block_size=layout.block_size,
        )
        # Zero where blocks are those that were saved; the mean over ranks counts it once.
        bucket.worker_error += lost
        bucket.exp_avg = None


def freeze_others(bucket: AdamBucket, flats: Flats, frozen: set[str], mask: Mask) -> None:
    """Preconditioners for parameters of a frozen bucket that were saved with second moments."""
    padded = bucket.layout.padded_numel
    for kind in ("server_error", "worker_error"):
        if kind not in flats:
            flats[kind] = bucket.new_buffer(padded)
    if "preconditioner" not in flats:
        flats["preconditioner"] = new_preconditioner(bucket)
    if "exp_avg_sq" not in flats:
        return
    kinds = ("exp_avg", "exp_avg_sq", "preconditioner")
    views = zip(*(bucket.flat.views(flats[kind]) for kind in kinds), strict=True)
    for name, steps, (m, v, factors) in zip(bucket.flat.names, bucket.steps, views, strict=True):
        if name not in frozen:
            v_hat = v.view(-1) / (1 - bucket.betas[1] ** max(steps.item(), 1))
            factors.copy_(((v_hat.sqrt() + bucket.eps).reciprocal()).view(factors.shape))
            hidden = mask(name, v_hat)
            if hidden is not None:
                factors.masked_fill_(hidden.view(factors.shape), 0.0)
            m *= factors


def thaw(bucket: AdamBucket, flats: Flats, frozen: set[str]) -> None:
    """Moments for parameters of a bucket in stage 1 that were saved with preconditioners."""
    if not frozen:
        return
    if "exp_avg_sq" not in flats:
        flats["exp_avg_sq"] = bucket.new_buffer(bucket.layout.padded_numel)
    held = _mean_error(bucket, flats) + flats["server_error"]
    views = (bucket.flat.views(flats[k]) for k in ("exp_avg", "exp_avg_sq", "preconditioner"))
    parts = zip(*views, bucket.flat.views(held), strict=True)
    for name, steps, (m, v, factors, error) in zip(
        bucket.flat.names, bucket.steps, parts, strict=True
    ):
        if name in frozen:
            denom = torch.where(factors > 0, factors.float().reciprocal(), 0.0)
            m += error
            m *= denom
            root = (denom - bucket.eps).clamp(min=0)
            v.copy_(root.square() * (1 - bucket.betas[1] ** steps.item()))


def _mean_error(bucket: AdamBucket, flats: Flats) -> Tensor:
    rows = flats["worker_error"].view(-1, bucket.layout.padded_numel)
    return rows[0] if rows.shape[0] == 1 else rows.double().mean(0).float()


def _own_span(bucket: AdamBucket, flat: Tensor) -> Tensor:
    start, stop = bucket.flat.span
    return flat[start:stop].clone() if stop - start < flat.numel() else flat
