"""What the references of every codec share: rows of blocks, their statistics, packed signs.

Letters: B = blocks, width = elements of a full block, C = elements of a rank's chunk.

Every body of a codec returns the same bits, so the order of every rounding is part of the
definition. The sum of squares of a block runs in 32 float64 lanes: lane l adds the squares of
elements l, l + 32, l + 64, ... of the block in that order, then lane l adds lane l + 16, then
l + 8, + 4, + 2, + 1. A float32 squared is exact in float64 (48 bits of 53), so a fused
multiply-add rounds as a multiply and an add do, and nothing a float32 can hold overflows or
underflows. 32 lanes are a warp, four AVX-512 or eight AVX2 accumulators.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

NUM_LANES = 32


def pad_last(values: Tensor, multiple: int) -> Tensor:
    """Zeros after the last dim up to the next multiple."""
    return torch.nn.functional.pad(values, (0, -values.shape[-1] % multiple))


def as_blocks(flat: Tensor, width: int) -> Tensor:
    """``[N]`` to ``[B, width]``, zeros after the last element."""
    return pad_last(flat, width).view(-1, width)


def block_width(numel: int, block_size: int) -> int:
    """Elements of a full block; one short block is not padded to a ``block_size`` of any size."""
    return max(1, min(block_size, numel))


def block_counts(numel: int, width: int, device: torch.device) -> Tensor:
    """``[B]`` int64: every block is full but the last, which has what is left."""
    starts = torch.arange(0, numel, width, device=device)
    return (numel - starts).clamp(max=width)


def is_valid(counts: Tensor, width: int) -> Tensor:
    """``[B, width]`` bool: the elements that a block has, its padding left out."""
    return torch.arange(width, device=counts.device) < counts.view(-1, 1)


def block_rms(carried: Tensor, counts: Tensor) -> Tensor:
    """Root mean square of each row, in the order of additions that the module docstring fixes.

    Args:
        carried: ``[B, width]`` float32, zero past each block's count.
        counts: ``[B]`` elements of each block; a block of none has scale 0.

    Returns:
        ``[B]`` float32, NaN where a value of the block is not finite.
    """
    squares = pad_last(carried, NUM_LANES).double().square()  # padding adds +0.0: no change
    rows = squares.view(carried.shape[0], -1, NUM_LANES)
    lanes = rows[:, 0].clone()
    for row in range(1, rows.shape[1]):
        lanes += rows[:, row]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    # A tensor, not a number: torch divides a CUDA tensor by a number as a product with 1 / number.
    means = lanes.view(-1) / counts.clamp(min=1).double()
    scales = means.sqrt().float()
    # One NaN for every bad block: which NaN comes out of a sum depends on the machine.
    return torch.where(scales.isfinite(), scales, float("nan"))


def block_amax(carried: Tensor, largest: float) -> Tensor:
    """Scale of each row so that its largest magnitude has the code ``largest``.

    Args:
        carried: ``[B, width]`` float32.
        largest: the largest magnitude that a code holds.

    Returns:
        ``[B]`` float32, ``max |carried| / largest``; NaN where a value of the block is not finite
        or ``largest * scale`` would overflow.
    """
    amax = carried.abs().amax(dim=1)
    scales = amax / torch.full_like(amax, largest)
    return torch.where((scales * largest).isfinite(), scales, float("nan"))


def pack_bits(positive: Tensor) -> Tensor:
    """``[N]`` bool to ``[ceil(N / 8)]`` uint8, lowest bit first."""
    # A byte for each, where whole numbers by default would be eight.
    weights = (2 ** torch.arange(8, device=positive.device)).to(torch.uint8)
    return (pad_last(positive, 8).view(-1, 8) * weights).sum(dim=1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, numel: int) -> Tensor:
    """``[ceil(N / 8)]`` uint8 to ``[N]`` bool, lowest bit first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.reshape(-1, 1) >> shifts & 1).view(-1)[:numel].bool()


def signed_scale(positive: Tensor, scales: Tensor) -> Tensor:
    """``[B, width]`` float32: ``+scale`` of the row where positive, ``-scale`` elsewhere."""
    return torch.where(positive, scales.view(-1, 1), -scales.view(-1, 1))


def keep_error(
    error: Tensor, carried: Tensor, sent: Tensor, scales: Tensor, valid: Tensor | None = None
) -> None:
    """``error`` becomes ``carried - sent``, in place, but stays as it was in a bad block.

    Args:
        error: N elements float32, contiguous.
        carried: ``[B, width]``, what was to be sent.
        sent: ``[B, width]``, what the codes say.
        scales: ``[B]``, not finite where the block is bad.
        valid: ``[B, width]`` bool, False where padding keeps its error too.
    """
    numel = error.numel()
    old = as_blocks(error.reshape(-1), carried.shape[1])
    taken = scales.isfinite()[:, None]
    kept = torch.where(taken if valid is None else taken & valid, carried - sent, old)
    error.copy_(kept.view(-1)[:numel].view_as(error))


def mean_of_ranks(decode: Callable[[int], Tensor], num_ranks: int) -> Tensor:
    """``(rank 0 + rank 1 + ...) * (1 / W)``: float32, in rank order, each addition rounded."""
    total = decode(0)
    for rank in range(1, num_ranks):
        total = total + decode(rank)
    return total * (1.0 / num_ranks)
