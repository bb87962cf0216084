"""Inputs of the ops of a Transformer block: every type, rows that lie in memory in many ways."""

from __future__ import annotations

import torch

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = ["dense", "part of wider rows", "every other feature", "rows exchanged"]


def make_rows(shape, dtype, layout="dense", seed=0, spread=1.0):
    """Normal values of ``shape`` in ``dtype``, whose rows lie as ``layout`` says."""
    generator = torch.Generator().manual_seed(seed)
    *lead, width = shape
    values = spread * torch.randn(*shape, generator=generator, dtype=torch.float64)
    if layout == "dense":
        return values.to(dtype)
    if layout == "part of wider rows":
        memory = torch.zeros(*lead, width + 3, dtype=dtype)
        view = memory[..., 1 : 1 + width]
    elif layout == "every other feature":
        memory = torch.zeros(*lead, 2 * width, dtype=dtype)
        view = memory[..., ::2]
    else:  # the leading dimensions in reverse order
        memory = torch.zeros(*reversed(lead), width, dtype=dtype)
        view = memory.permute(*reversed(range(len(lead))), len(lead))
    view.copy_(values)
    assert view.shape == tuple(shape)
    return view


def eps_of(dtype):
    """(of the result's rounding, of the scalars that it is computed in)."""
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.finfo(dtype).eps, torch.finfo(computed).eps


def assert_within(got, exact, bound, what):
    """Everywhere finite and within ``bound``; exact and bound are float64."""
    # A float64 result is held to one that is as inexact as itself.
    bound = bound * (2 if got.dtype == torch.float64 else 1)
    # Below the normal numbers a result is spaced by the least of them.
    info = torch.finfo(got.dtype)
    error = (got.double() - exact).abs()
    worst = (error - bound).max() if error.numel() else torch.tensor(-1.0)
    assert got.shape == exact.shape
    assert worst <= info.smallest_normal * info.eps, f"{what}: {worst.item()} over the bound"
