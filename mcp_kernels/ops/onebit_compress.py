"""Sign compression with error feedback: the wire format of 1-bit Adam.

Source: Tang et al., "1-bit Adam" (ICML 2021, arXiv 2102.02888), section 4, with one scale for each
block instead of one for the whole tensor.

Letters: N = elements, B = blocks = ceil(N / block_size), c = x + error in float32.

Every body of these two ops returns the same bits, so the order of every rounding is part of the
definition. The sum of squares of a block runs in 32 float64 lanes: lane l adds the squares of
elements l, l + 32, l + 64, ... of the block in that order, then lane l adds lane l + 16, then
l + 8, + 4, + 2, + 1. A float32 squared is exact in float64 (48 bits of 53), so a fused
multiply-add rounds as a multiply and an add do, and nothing a float32 can hold overflows or
underflows. 32 lanes are a warp, four AVX-512 or eight AVX2 accumulators.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcp_kernels._op import define_op

NUM_LANES = 32
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    _check_block_size("onebit_compress", block_size)
    _check_floats("onebit_compress", x)
    _check_error(x, error)
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
    _check_block_size("onebit_decompress", block_size)
    _check_packed(bits, scales, numel, block_size)
    return torch.ops.mcp_kernels.onebit_decompress(bits, scales.detach(), numel, block_size)


def onebit_compress_ref(x: Tensor, error: Tensor, block_size: int = 1024) -> tuple[Tensor, Tensor]:
    """The definition of ``onebit_compress``; every other body is held to its bits."""
    numel = x.numel()
    if numel == 0:
        return _empty_result(x, block_size)
    width = _block_width(numel, block_size)
    flat_error = error.view(-1)
    carried = _as_blocks(x.reshape(-1).float() + flat_error, width)  # [B, width]
    old_error = _as_blocks(flat_error, width)
    scales = _block_rms(carried, numel)  # [B]
    positive = carried >= 0  # False for NaN

    sent = torch.where(positive, scales[:, None], -scales[:, None])
    kept = torch.where(scales.isfinite()[:, None], carried - sent, old_error)
    error.copy_(kept.view(-1)[:numel].view_as(error))
    return _pack_bits(positive.view(-1)[:numel]), scales


def onebit_decompress_ref(
    bits: Tensor, scales: Tensor, numel: int, block_size: int = 1024
) -> Tensor:
    """The definition of ``onebit_decompress``."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    positive = (bits.reshape(-1, 1) >> shifts & 1).view(-1)[:numel].bool()
    if numel == 0:
        return scales.new_empty(0)
    width = _block_width(numel, block_size)
    scale = scales.reshape(-1, 1).expand(-1, width).reshape(-1)[:numel]
    return torch.where(positive, scale, -scale)


def _block_rms(carried: Tensor, numel: int) -> Tensor:
    """Root mean square of each row, in the order of additions that the module docstring fixes."""
    num_blocks, width = carried.shape
    squares = _pad_last(carried, NUM_LANES).double().square()  # padding adds +0.0: no change
    rows = squares.view(num_blocks, -1, NUM_LANES)
    lanes = rows[:, 0].clone()
    for row in range(1, rows.shape[1]):
        lanes += rows[:, row]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    # A tensor, not a number: torch divides a CUDA tensor by a number as a product with 1 / number.
    count = torch.full_like(lanes, width)  # [B, 1]
    count[-1] = numel - (num_blocks - 1) * width
    scales = (lanes / count).sqrt().float().view(-1)
    # One NaN for every bad block: which NaN comes out of a sum depends on the machine.
    return torch.where(scales.isfinite(), scales, float("nan"))


def _pack_bits(positive: Tensor) -> Tensor:
    """``[N]`` bool to ``[ceil(N / 8)]`` uint8, lowest bit first."""
    weights = 2 ** torch.arange(8, device=positive.device)
    return (_pad_last(positive, 8).view(-1, 8) * weights).sum(dim=1, dtype=torch.uint8)


def _pad_last(values: Tensor, multiple: int) -> Tensor:
    """Zeros after the last dim up to the next multiple."""
    return torch.nn.functional.pad(values, (0, -values.shape[-1] % multiple))


def _as_blocks(flat: Tensor, width: int) -> Tensor:
    """``[N]`` to ``[B, width]``, zeros after the last element."""
    return _pad_last(flat, width).view(-1, width)


def _block_width(numel: int, block_size: int) -> int:
    """Elements of a full block; one short block is not padded to a ``block_size`` of any size."""
    return min(block_size, numel)


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


def _check_block_size(op: str, block_size: int) -> None:
    if not isinstance(block_size, (int, torch.SymInt)) or isinstance(block_size, bool):
        raise TypeError(f"{op}: block_size must be an int, got {type(block_size).__name__}")
    if block_size <= 0 or block_size % 8:
        nearest = max(8, int(block_size) // 8 * 8)
        raise ValueError(
            f"{op}: block_size must be a positive multiple of 8, got {block_size}; use {nearest}"
        )


def _check_floats(op: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: x must be a Tensor, got {type(x).__name__}")
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"{op}: x must be float32, bfloat16 or float16, got {x.dtype}; convert it by x.float()"
        )
    if x.layout != torch.strided:
        raise ValueError(
            f"{op}: x must be a strided tensor, got {x.layout}; convert it by x.to_dense()"
        )


def _check_error(x: Tensor, error: Tensor) -> None:
    op = "onebit_compress"
    if not isinstance(error, Tensor):
        raise TypeError(f"{op}: error must be a Tensor, got {type(error).__name__}")
    if error.dtype != torch.float32:
        raise TypeError(
            f"{op}: error must be float32, got {error.dtype}; "
            f"make it by torch.zeros(x.numel(), device=x.device)"
        )
    if error.numel() != x.numel():
        raise ValueError(
            f"{op}: error must be as large as x ({x.numel()} elements), got {error.numel()}"
        )
    if error.device != x.device:
        raise ValueError(f"{op}: error must be on x's device {x.device}, got {error.device}")
    if error.layout != torch.strided or not error.is_contiguous():
        raise ValueError(
            f"{op}: error must be contiguous since it is updated in place, got strides "
            f"{error.stride() if error.layout == torch.strided else error.layout}; "
            f"make it by torch.zeros(x.numel(), device=x.device)"
        )
    if error.requires_grad:
        raise ValueError(
            f"{op}: error must not require grad since it is updated in place, got "
            f"requires_grad=True; pass error.detach()"
        )


def _check_packed(bits: Tensor, scales: Tensor, numel: int, block_size: int) -> None:
    op = "onebit_decompress"
    for name, tensor, dtype in (("bits", bits, torch.uint8), ("scales", scales, torch.float32)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name} must be a Tensor, got {type(tensor).__name__}")
        if tensor.dtype != dtype:
            raise TypeError(f"{op}: {name} must be {dtype}, got {tensor.dtype}")
    if not isinstance(numel, (int, torch.SymInt)) or isinstance(numel, bool):
        raise TypeError(f"{op}: numel must be an int, got {type(numel).__name__}")
    if numel < 0:
        raise ValueError(f"{op}: numel must be >= 0, got {numel}")
    num_bytes, num_blocks = (numel + 7) // 8, (numel + block_size - 1) // block_size
    if bits.numel() != num_bytes:
        raise ValueError(
            f"{op}: bits must be {num_bytes} bytes for numel={numel}, got {bits.numel()}"
        )
    if scales.numel() != num_blocks:
        raise ValueError(
            f"{op}: scales must be {num_blocks} values for numel={numel} and "
            f"block_size={block_size}, got {scales.numel()}"
        )
    if bits.device != scales.device:
        raise ValueError(
            f"{op}: scales must be on the device of bits ({bits.device}), got {scales.device}"
        )


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
