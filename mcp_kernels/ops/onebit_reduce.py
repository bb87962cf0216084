"""The server's side of a compressed all-reduce: mean of W codes, error feedback, codes again.

Source: Tang et al., "1-bit Adam" (ICML 2021, arXiv 2102.02888), section 4: the owner of a chunk
averages what the workers sent, adds its own error and compresses the sum once more.

Letters: W = ranks, C = elements of the chunk, B = its blocks = ceil(C / block_size).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcp_kernels._op import define_op
from mcp_kernels.ops._blocks import (
    as_blocks,
    block_counts,
    block_rms,
    block_width,
    is_valid,
    keep_error,
    mean_of_ranks,
    pack_bits,
    signed_scale,
)
from mcp_kernels.ops._codec_checks import check_block_size, check_reduce
from mcp_kernels.ops.onebit_compress import onebit_decompress_ref


def onebit_reduce(
    bits: Tensor,
    scales: Tensor,
    server_error: Tensor,
    counts: Tensor | None = None,
    block_size: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Average the 1-bit codes of W ranks, add the server's error, and code the sum again.

    ``u = (rank 0 + rank 1 + ... in rank order) * (1 / W) + server_error``, each operation rounded
    to float32; then as ``onebit_compress``.

    Args:
        bits: ``[W, ceil(C / 8)]`` uint8, one row a rank.
        scales: ``[W, B]`` float32. One that is not finite makes the block bad.
        server_error: ``[C]`` float32, contiguous, **updated in place**; a bad block keeps its own.
        counts: ``[B]`` int32, elements that each block has, as ``BlockLayout.counts`` gives them;
            the rest of a block is padding: bits 0, error kept. None: every block is full, the last
            up to C.
        block_size: elements that share a scale, a positive multiple of 8.

    Returns:
        bits: ``[ceil(C / 8)]`` uint8.
        scales: ``[B]`` float32, NaN for a bad block, 0 for one of no elements.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument breaks another rule above.

    Cost: one pass over memory for blocks up to 4096 elements: ``W / 8 + 4`` bytes read and 4.125
        written an element of the chunk.
    """
    check_block_size("onebit_reduce", block_size)
    check_reduce(
        *("onebit_reduce", ("bits", bits), scales, server_error, counts, block_size), bits_each=1
    )
    return torch.ops.mcp_kernels.onebit_reduce(
        bits, scales.detach(), server_error, counts, block_size
    )


def onebit_reduce_ref(
    bits: Tensor, scales: Tensor, server_error: Tensor, counts: Tensor | None, block_size: int
) -> tuple[Tensor, Tensor]:
    """The definition; every other body is held to its bits."""
    numel = server_error.numel()
    if numel == 0:
        return bits.new_empty(0), scales.new_empty(0)
    width = block_width(numel, block_size)
    if counts is None:
        counts = block_counts(numel, width, bits.device)
    valid = is_valid(counts, width)  # [B, width]

    def decode(rank: int) -> Tensor:
        flat = onebit_decompress_ref(bits[rank], scales[rank], numel, block_size)
        return as_blocks(flat, width)

    mean = mean_of_ranks(decode, bits.shape[0])
    carried = torch.where(valid, mean + as_blocks(server_error.view(-1), width), 0.0)
    new_scales = block_rms(carried, counts)
    positive = (carried >= 0) & valid
    keep_error(server_error, carried, signed_scale(positive, new_scales), new_scales, valid)
    return pack_bits(positive.view(-1)[:numel]), new_scales


def _fake(
    bits: Tensor, scales: Tensor, server_error: Tensor, counts: Tensor | None, block_size: int
) -> tuple[Tensor, Tensor]:
    return bits.new_empty(bits.shape[1]), scales.new_empty(scales.shape[1])


define_op(
    "onebit_reduce(Tensor bits, Tensor scales, Tensor(a!) server_error, Tensor? counts, "
    "SymInt block_size) -> (Tensor bits, Tensor scales)",
    reference=onebit_reduce_ref,
    fake=_fake,
)
