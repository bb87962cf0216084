"""Sign compression with error feedback: the wire format of 1-bit Adam.

Source: Tang et al., "1-bit Adam" (ICML 2021, arXiv 2102.02888), section 4, with one scale for each
block instead of one for the whole tensor.

Letters: N = elements, B = blocks = ceil(N / block_size), c = x + error in float32.

Every body of these two ops returns the same bits; ``_blocks.py`` fixes the order of the sums.
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
    keep_error,
    pack_bits,
    signed_scale,
    unpack_bits,
)
from mcp_kernels.ops._codec_checks import check_block_size, check_error, check_floats, check_packed


def onebit_compress(x: Tensor, error: Tensor, block_size: int = 1024) -> tuple[Tensor, Tensor]:
    """Pack the sign of ``c = x + error`` into bits; what the bits lose becomes the new error.

    Zeros of either sign count as positive. No gradient flows: the results never require one.

    Args:
        x: ``[...]`` N elements of float32, bfloat16 or float16, any shape and strides, read in
            logical order. It may be ``error`` itself, but must not overlap it in part.
        error: N elements, float32, contiguous, what earlier calls could not send; **updated in
            place** to ``c - scale`` where the bit is set and ``c + scale`` where it is not.
        block_size: elements that share a scale, a positive multiple of 8. The last block may be
            shorter; its scale counts the elements it has.

    Returns:
        bits: ``[ceil(N / 8)]`` uint8; bit i of byte j says that element 8j + i of c is >= 0 (as
            ``numpy.packbits(c >= 0, bitorder="little")``). Spare bits of the last byte are 0.
        scales: ``[B]`` float32, root mean square of c over each block, finite exactly when every
            c in the block is. A block that holds a NaN or an infinity gets scale NaN and keeps
            its error as it was, so a step that is skipped for it has poisoned nothing there.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument breaks another rule above.

    Cost: one pass over memory for blocks up to 2048 elements: reads 8 bytes and writes 4.125
        bytes an element (float32 x); the wire carries 1 bit an element and 4 bytes a block.
    """
    check_block_size("onebit_compress", block_size)
    check_floats("onebit_compress", x)
    check_error("onebit_compress", x, error)
    return torch.ops.mcp_kernels.onebit_compress(x.detach(), error, block_size)


def onebit_decompress(bits: Tensor, scales: Tensor, numel: int, block_size: int = 1024) -> Tensor:
    """Rebuild what the bits say: ``+scale`` of the block where a bit is set, ``-scale`` elsewhere.

    No gradient flows: the result never requires one.

    Args:
        bits: ``[ceil(N / 8)]`` uint8, as ``onebit_compress`` returns them; spare bits are ignored.
        scales: ``[B]`` float32.
        numel: N, how many elements to rebuild, >= 0.
        block_size: elements that share a scale, a positive multiple of 8.

    Returns:
        ``[N]`` float32. ``onebit_decompress(...) + error`` is c again, to one rounding.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument breaks another rule above.

    Cost: reads 1/8 byte and writes 4 bytes an element.
    """
    check_block_size("onebit_decompress", block_size)
    check_packed("onebit_decompress", ("bits", bits), scales, numel, block_size, bits_each=1)
    return torch.ops.mcp_kernels.onebit_decompress(bits, scales.detach(), numel, block_size)


def onebit_compress_ref(x: Tensor, error: Tensor, block_size: int = 1024) -> tuple[Tensor, Tensor]:
    """The definition of ``onebit_compress``; every other body is held to its bits."""
    numel = x.numel()
    if numel == 0:
        return _empty_result(x, block_size)
    width = block_width(numel, block_size)
    carried = as_blocks(x.reshape(-1).float() + error.view(-1), width)  # [B, width]
    scales = block_rms(carried, block_counts(numel, width, x.device))  # [B]
    positive = carried >= 0  # False for NaN
    keep_error(error, carried, signed_scale(positive, scales), scales)
    return pack_bits(positive.view(-1)[:numel]), scales


def onebit_decompress_ref(
    bits: Tensor, scales: Tensor, numel: int, block_size: int = 1024
) -> Tensor:
    """The definition of ``onebit_decompress``."""
    if numel == 0:
        return scales.new_empty(0)
    width = block_width(numel, block_size)
    scale = scales.reshape(-1, 1).expand(-1, width).reshape(-1)[:numel]
    return torch.where(unpack_bits(bits, numel), scale, -scale)


def onebit_decompress_into_ref(bits: Tensor, scales: Tensor, block_size: int, out: Tensor) -> None:
    """The definition: ``onebit_decompress`` into memory that is there already."""
    values = torch.ops.mcp_kernels.onebit_decompress(bits, scales, out.numel(), block_size)
    out.copy_(values.view(out.shape))


def _empty_result(x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Uninitialised bits and scales of the right shapes, for sizes that may be symbolic."""
    num_bytes = (x.numel() + 7) // 8
    num_blocks = (x.numel() + block_size - 1) // block_size
    bits = x.new_empty(num_bytes, dtype=torch.uint8)
    return bits, x.new_empty(num_blocks, dtype=torch.float32)


def _compress_fake(x: Tensor, error: Tensor, block_size: int = 1024) -> tuple[Tensor, Tensor]:
    return _empty_result(x, block_size)


def _decompress_fake(bits: Tensor, scales: Tensor, numel: int, block_size: int = 1024) -> Tensor:
    return scales.new_empty(numel)


define_op(
    "onebit_compress(Tensor x, Tensor(a!) error, SymInt block_size=1024) "
    "-> (Tensor bits, Tensor scales)",
    reference=onebit_compress_ref,
    fake=_compress_fake,
)
define_op(
    "onebit_decompress(Tensor bits, Tensor scales, SymInt numel, SymInt block_size=1024) -> Tensor",
    reference=onebit_decompress_ref,
    fake=_decompress_fake,
)
define_op(
    "onebit_decompress_into(Tensor bits, Tensor scales, SymInt block_size, Tensor(a!) out) -> ()",
    reference=onebit_decompress_into_ref,
    fake=lambda bits, scales, block_size, out: None,
)
