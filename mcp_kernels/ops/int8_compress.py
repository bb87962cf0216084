"""Eight bits an element: whole numbers of a scale a block, with error feedback.

A quarter of the bytes of float32 on the wire, half of bfloat16, and 1/254 of the block's largest
value as the most that an element loses, which the error gives back later.

Letters: N = elements, B = blocks = ceil(N / block_size), W = ranks, C = elements of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcp_kernels._op import define_op
from mcp_kernels.ops._scaled_codec import ScaledCodec


def _encode(units: Tensor) -> Tensor:
    return units.round().to(torch.int8).view(torch.uint8)


def _decode(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.int8).float()


INT8 = ScaledCodec(name="int8", bits_each=8, largest=127.0, encode=_encode, decode=_decode)


def int8_compress(x: Tensor, error: Tensor, block_size: int = 1024) -> tuple[Tensor, Tensor]:
    """Round ``c = x + error`` to whole numbers in -127 .. 127; what is lost becomes the new error.

    ``scale = max |c| / 127`` of the block; the code is ``c / scale``, clamped to
    +-127 and rounded to nearest, ties to even. No gradient flows.

    Args:
        x: ``[...]`` N elements of float32, bfloat16 or float16, any shape and strides, read in
            logical order. It may be ``error`` itself, but must not overlap it in part.
        error: N elements, float32, contiguous, what earlier calls could not send; **updated in
            place** to ``c - code * scale``.
        block_size: elements that share a scale, a positive multiple of 8. The last block may be
            shorter.

    Returns:
        codes: ``[N]`` uint8, a byte an element, two's complement.
        scales: ``[B]`` float32. 0 where every c of the block is 0 or too small to have a scale:
            codes 0, the error keeps c. NaN where a c is not finite or the scale would overflow:
            codes 0, the error stays as it was.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument breaks another rule above.

    Cost: one pass over memory for blocks up to 4096 elements: reads 8 bytes and writes 5
        an element (float32 x).
    """
    return INT8.compress(x, error, block_size)


def int8_quantize(x: Tensor, block_size: int = 1024) -> tuple[Tensor, Tensor]:
    """Round ``x`` to whole numbers in -127 .. 127 of a scale a block, without error feedback.

    An element loses at most half a scale, ``max |block| / 254``.

    Args:
        x: ``[...]`` N elements of float32, bfloat16 or float16, any shape and strides, read in
            logical order.
        block_size: elements that share a scale, a positive multiple of 8. The last block may be
            shorter.

    Returns:
        codes: ``[N]`` uint8, as ``int8_compress`` of ``x`` with an error of zeros gives them.
        scales: ``[B]`` float32, likewise.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument breaks another rule above.

    Cost: one pass over memory: reads 4 bytes and writes 1 an element (float32 x).
    """
    return INT8.quantize(x, block_size)


def int8_decompress(codes: Tensor, scales: Tensor, numel: int, block_size: int = 1024) -> Tensor:
    """Rebuild ``code * scale``; NaN throughout a block whose scale is not finite.

    Args:
        codes: ``[N]`` uint8, as ``int8_compress`` returns them.
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
    return INT8.decompress(codes, scales, numel, block_size)


def int8_reduce(
    codes: Tensor,
    scales: Tensor,
    server_error: Tensor,
    counts: Tensor | None = None,
    block_size: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Average the codes of W ranks, add the server's error, and code the sum again.

    ``u = (rank 0 + rank 1 + ... in rank order) * (1 / W) + server_error``, each operation rounded
    to float32; then as ``int8_compress``.

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
    return INT8.reduce(codes, scales, server_error, counts, block_size)


for _schema, _bodies in INT8.definitions():
    define_op(_schema, **_bodies)
