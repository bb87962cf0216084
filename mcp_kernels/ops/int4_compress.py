"""Four bits an element: whole numbers of a scale a block, with error feedback.

An eighth of the bytes of float32 on the wire. An element loses up to 1/14 of the block's largest
value, so error feedback is not an extra here.

Source: the width and the feedback are those of LoCo (arXiv 2407.04480); scale and
rounding are ours.

Letters: N = elements, B = blocks = ceil(N / block_size), W = ranks, C = elements of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcp_kernels._op import define_op
from mcp_kernels.ops._scaled_codec import ScaledCodec


def _encode(units: Tensor) -> Tensor:
    return units.round().to(torch.int8).view(torch.uint8) & 15


def _decode(codes: Tensor) -> Tensor:
    signed = (codes ^ 8).to(torch.int8) - 8  # two's complement of four bits
    return signed.float()


INT4 = ScaledCodec(name="int4", bits_each=4, largest=7.0, encode=_encode, decode=_decode)


def int4_compress(x: Tensor, error: Tensor, block_size: int = 1024) -> tuple[Tensor, Tensor]:
    """Round ``c = x + error`` to whole numbers in -7 .. 7; what is lost becomes the new error.

    ``scale = max |c| / 7`` of the block; the code is ``c / scale``, clamped to
    +-7 and rounded to nearest, ties to even. No gradient flows.

    Args:
        x: ``[...]`` N elements of float32, bfloat16 or float16, any shape and strides, read in
            logical order. It may be ``error`` itself, but must not overlap it in part.
        error: N elements, float32, contiguous, what earlier calls could not send; **updated in
            place** to ``c - code * scale``.
        block_size: elements that share a scale, a positive multiple of 8. The last block may be
            shorter.

    Returns:
        codes: ``[ceil(N / 2)]`` uint8, two's complement in four bits, two elements a byte, the
            first in the low half; a spare half is 0.
        scales: ``[B]`` float32. 0 where every c of the block is 0 or too small to have a scale:
            codes 0, the error keeps c. NaN where a c is not finite or the scale would overflow:
            codes 0, the error stays as it was.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument breaks another rule above.

    Cost: one pass over memory for blocks up to 4096 elements: reads 8 bytes and writes 4.5
        an element (float32 x).
    """
    return INT4.compress(x, error, block_size)


def int4_quantize(x: Tensor, block_size: int = 1024) -> tuple[Tensor, Tensor]:
    """Round ``x`` to whole numbers in -7 .. 7 of a scale a block, without error feedback.

    An element loses at most half a scale, ``max |block| / 14``.

    Args:
        x: ``[...]`` N elements of float32, bfloat16 or float16, any shape and strides, read in
            logical order.
        block_size: elements that share a scale, a positive multiple of 8. The last block may be
            shorter.

    Returns:
        codes: ``[ceil(N / 2)]`` uint8, as ``int4_compress`` of ``x`` with an error of zeros gives
            them.
        scales: ``[B]`` float32, likewise.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument breaks another rule above.

    Cost: one pass over memory: reads 4 bytes and writes half a byte an element (float32 x).
    """
    return INT4.quantize(x, block_size)


def int4_decompress(codes: Tensor, scales: Tensor, numel: int, block_size: int = 1024) -> Tensor:
    """Rebuild ``code * scale``; NaN throughout a block whose scale is not finite.

    Args:
        codes: ``[ceil(N / 2)]`` uint8, as ``int4_compress`` returns them.
        scales: ``[B]`` float32.
        numel: N, how many elements to rebuild, >= 0.
        block_size: elements that share a scale, a positive multiple of 8.

    Returns:
        ``[N]`` float32; it never requires grad.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument breaks another rule above.

    Cost: reads half a byte and writes 4 bytes an element.
    """
    return INT4.decompress(codes, scales, numel, block_size)


def int4_reduce(
    codes: Tensor,
    scales: Tensor,
    server_error: Tensor,
    counts: Tensor | None = None,
    block_size: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Average the codes of W ranks, add the server's error, and code the sum again.

    ``u = (rank 0 + rank 1 + ... in rank order) * (1 / W) + server_error``, each operation rounded
    to float32; then as ``int4_compress``.

    Args:
        codes: ``[W, ceil(C / 2)]`` uint8, one row a rank.
        scales: ``[W, B]`` float32. One that is not finite makes the block bad.
        server_error: ``[C]`` float32, contiguous, **updated in place**; a bad block keeps its own.
        counts: ``[B]`` int32, elements that each block has, as ``BlockLayout.counts`` gives them;
            the rest of a block is padding: codes 0, error kept. None: every block is full, the
            last up to C.
        block_size: elements that share a scale, a positive multiple of 8.

    Returns:
        codes: ``[ceil(C / 2)]`` uint8.
        scales: ``[B]`` float32, NaN for a bad block.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument breaks another rule above.

    Cost: one pass over memory for blocks up to 4096 elements: ``W / 2 + 4`` bytes read and
        4.5 written an element of the chunk.
    """
    return INT4.reduce(codes, scales, server_error, counts, block_size)


for _schema, _bodies in INT4.definitions():
    define_op(_schema, **_bodies)
