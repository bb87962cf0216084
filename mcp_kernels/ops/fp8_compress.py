"""Eight bits an element as E4M3 floating point: a scale a block, with error feedback.

As many bytes as int8. Small elements of a block keep 4 significant bits down to 1/28672 of the
largest, where int8 has steps of 1/127 of it; large ones lose more than under int8.

Source: Micikevicius et al., "FP8 formats for deep learning" (arXiv 2209.05433).

Letters: N = elements, B = blocks = ceil(N / block_size), W = ranks, C = elements of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcp_kernels._op import define_op
from mcp_kernels.ops._scaled_codec import ScaledCodec


def _encode(units: Tensor) -> Tensor:
    return units.to(torch.float8_e4m3fn).view(torch.uint8)


def _decode(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.float8_e4m3fn).float()


FP8 = ScaledCodec(name="fp8", bits_each=8, largest=448.0, encode=_encode, decode=_decode)


def fp8_compress(x: Tensor, error: Tensor, block_size: int = 1024) -> tuple[Tensor, Tensor]:
    """Round ``c = x + error`` to E4M3 numbers; what is lost becomes the new error.

    ``scale = max |c| / 448`` of the block; the code is ``c / scale``, clamped to
    +-448 and rounded to nearest, ties to even. No gradient flows.

    Args:
        x: ``[...]`` N elements of float32, bfloat16 or float16, any shape and strides, read in
            logical order. It may be ``error`` itself, but must not overlap it in part.
        error: N elements, float32, contiguous, what earlier calls could not send; **updated in
            place** to ``c - code * scale``.
        block_size: elements that share a scale, a positive multiple of 8. The last block may be
            shorter.

    Returns:
        codes: ``[N]`` uint8, a byte an element, the bits of torch.float8_e4m3fn.
        scales: ``[B]`` float32. 0 where every c of the block is 0 or too small to have a scale:
            codes 0, the error keeps c. NaN where a c is not finite or the scale would overflow:
            codes 0, the error stays as it was.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument breaks another rule above.

    Cost: one pass over memory for blocks up to 4096 elements: reads 8 bytes and writes 5
        an element (float32 x).
    """
    return FP8.compress(x, error, block_size)


def fp8_quantize(x: Tensor, block_size: int = 1024) -> tuple[Tensor, Tensor]:
    """Round ``x`` to E4M3 numbers of a scale a block, without error feedback.

    An element loses at most 2^-4 of itself, or 2^-10 of the scale where that is more.

    Args:
        x: ``[...]`` N elements of float32, bfloat16 or float16, any shape and strides, read in
            logical order.
        block_size: elements that share a scale, a positive multiple of 8. The last block may be
            shorter.

    Returns:
        codes: ``[N]`` uint8, as ``fp8_compress`` of ``x`` with an error of zeros gives them.
        scales: ``[B]`` float32, likewise.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument breaks another rule above.

    Cost: one pass over memory: reads 4 bytes and writes 1 an element (float32 x).
    """
    return FP8.quantize(x, block_size)


def fp8_decompress(codes: Tensor, scales: Tensor, numel: int, block_size: int = 1024) -> Tensor:
    """Rebuild ``code * scale``; NaN throughout a block whose scale is not finite.

    Args:
        codes: ``[N]`` uint8, as ``fp8_compress`` returns them.
        scales: ``[B]`` float32.
        numel: N, how many elements to rebuild, >= 0.
        block_size: elements that share a scale, a positive multiple of 8.

    Returns:
        ``[N]`` float32; it never requires grad.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument breaks another rule above.

    Cost: reads 1 byte and writes 4 bytes an element.
    """
    return FP8.decompress(codes, scales, numel, block_size)


def fp8_reduce(
    codes: Tensor,
    scales: Tensor,
    server_error: Tensor,
    counts: Tensor | None = None,
    block_size: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Average the codes of W ranks, add the server's error, and code the sum again.

    ``u = (rank 0 + rank 1 + ... in rank order) * (1 / W) + server_error``, each operation rounded
    to float32; then as ``fp8_compress``.

    Args:
        codes: ``[W, C]`` uint8, one row a rank.
        scales: ``[W, B]`` float32. One that is not finite makes the block bad.
        server_error: ``[C]`` float32, contiguous, **updated in place**; a bad block keeps its own.
        counts: ``[B]`` int32, elements that each block has, as ``BlockLayout.counts`` gives them;
            the rest of a block is padding: codes 0, error kept. None: every block is full, the
            last up to C.
        block_size: elements that share a scale, a positive multiple of 8.

    Returns:
        codes: ``[C]`` uint8.
        scales: ``[B]`` float32, NaN for a bad block.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument breaks another rule above.

    Cost: one pass over memory for blocks up to 4096 elements: ``W + 4`` bytes read and
        5 written an element of the chunk.
    """
    return FP8.reduce(codes, scales, server_error, counts, block_size)


for _schema, _bodies in FP8.definitions():
    define_op(_schema, **_bodies)
