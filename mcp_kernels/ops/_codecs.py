"""The codecs that gradients travel in: a name, bits an element, and the three ops of each.

A codec compresses with error feedback, reduces what all ranks sent for one chunk, and rebuilds
values. Every codec has one float32 scale a block, NaN exactly where the block held a value that is
not finite, so scales carry the finite flag of their block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Codec:
    """One wire format; its ops are ``mcp_kernels::<name>_compress``, ``_reduce`` and so on."""

    name: str
    bits: int
    """An element on the wire, its share of the scale apart."""

    def code_bytes(self, numel: int) -> int:
        """Bytes that the codes of ``numel`` elements take."""
        return -(-numel * self.bits // 8)

    def compress(self, x: Tensor, error: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        """Codes and scales of ``x + error``; ``error`` becomes what they lose, in place."""
        return self._op("compress")(x, error, block_size)

    def reduce(
        self,
        codes_WN: Tensor,
        scales_WB: Tensor,
        server_error: Tensor,
        counts: Tensor | None,
        block_size: int,
    ) -> tuple[Tensor, Tensor]:
        """Codes and scales of the ranks' mean plus ``server_error``, which is updated in place."""
        return self._op("reduce")(codes_WN, scales_WB, server_error, counts, block_size)

    def decompress(self, codes: Tensor, scales: Tensor, numel: int, block_size: int) -> Tensor:
        """``[numel]`` float32."""
        return self._op("decompress")(codes, scales, numel, block_size)

    def decompress_into(self, codes: Tensor, scales: Tensor, block_size: int, out: Tensor) -> None:
        """As ``decompress`` of ``out.numel()`` elements, into contiguous float32 ``out``."""
        self._op("decompress_into")(codes, scales, block_size, out)

    def _op(self, part: str) -> Any:
        return getattr(torch.ops.mcp_kernels, f"{self.name}_{part}")


ONEBIT = Codec("onebit", 1)
INT4 = Codec("int4", 4)
INT8 = Codec("int8", 8)
FP8 = Codec("fp8", 8)
CODECS = {codec.name: codec for codec in (ONEBIT, INT4, INT8, FP8)}


def find_codec(op: str, codec: str | Codec) -> Codec:
    """The codec called ``codec``.

    Raises:
        ValueError: there is none of that name.
    """
    if isinstance(codec, Codec):
        return codec
    if codec not in CODECS:
        raise ValueError(f"{op}: codec must be one of {', '.join(CODECS)}, got {codec!r}")
    return CODECS[codec]
