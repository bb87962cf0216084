"""Codecs of a few bits an element with a scale a block: what int8, int4 and fp8 have in common.

A codec is data: how many bits a code has, the largest magnitude it holds, how values in units of
the scale become codes and back. Compress, decompress and reduce are the same for all.

Letters: N = elements, B = blocks = ceil(N / block_size), W = ranks, C = elements of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcp_kernels.ops._blocks import (
    as_blocks,
    block_amax,
    block_counts,
    block_width,
    is_valid,
    keep_error,
    mean_of_ranks,
)
from mcp_kernels.ops._codec_checks import (
    check_block_size,
    check_error,
    check_floats,
    check_packed,
    check_reduce,
    num_code_bytes,
)

NAN = float("nan")


@dataclass(frozen=True)
class ScaledCodec:
    """One codec. Rounding is to nearest, ties to even, after a clamp to ``largest``.

    ``scale = max |c| / largest`` of the block, in float32; a value's code is that of
    ``c / scale``. Where the scale is 0 (no value, or all too small to have one), every code is 0
    and the error keeps c. Where a value is not finite, or ``largest * scale`` is not, the scale is
    NaN, every code is 0 and the error stays as it was.
    """

    name: str
    """First word of its ops' names."""
    bits_each: int
    """Bits of a code: 8, or 4 with two codes a byte, the lower one first."""
    largest: float
    """Largest magnitude that a code holds."""
    encode: Callable[[Tensor], Tensor]
    """Float32 in ``[-largest, largest]`` to codes, uint8, each alone in its byte."""
    decode: Callable[[Tensor], Tensor]
    """Codes, uint8, each alone in its byte, to float32."""

    def compress(self, x: Tensor, error: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        """The public ``<codec>_compress`` after its docstring."""
        op = f"{self.name}_compress"
        check_block_size(op, block_size)
        check_floats(op, x)
        check_error(op, x, error)
        return getattr(torch.ops.mcp_kernels, op)(x.detach(), error, block_size)

    def decompress(self, codes: Tensor, scales: Tensor, numel: int, block_size: int) -> Tensor:
        """The public ``<codec>_decompress`` after its docstring."""
        op = f"{self.name}_decompress"
        check_block_size(op, block_size)
        check_packed(*(op, ("codes", codes), scales, numel, block_size), bits_each=self.bits_each)
        return getattr(torch.ops.mcp_kernels, op)(codes, scales.detach(), numel, block_size)

    def quantize(self, x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        """The public ``<codec>_quantize`` after its docstring."""
        op = f"{self.name}_quantize"
        check_block_size(op, block_size)
        check_floats(op, x)
        return getattr(torch.ops.mcp_kernels, op)(x.detach(), block_size)

    def reduce(
        self,
        codes: Tensor,
        scales: Tensor,
        server_error: Tensor,
        counts: Tensor | None,
        block_size: int,
    ) -> tuple[Tensor, Tensor]:
        """The public ``<codec>_reduce`` after its docstring."""
        op = f"{self.name}_reduce"
        check_block_size(op, block_size)
        check_reduce(
            *(op, ("codes", codes), scales, server_error, counts, block_size),
            bits_each=self.bits_each,
        )
        return getattr(torch.ops.mcp_kernels, op)(
            codes, scales.detach(), server_error, counts, block_size
        )

    def compress_ref(
        self, x: Tensor, error: Tensor, block_size: int = 1024
    ) -> tuple[Tensor, Tensor]:
        """The definition of ``<codec>_compress``; every other body is held to its bits."""
        numel = x.numel()
        if numel == 0:
            return self._empty(x, numel, block_size)
        width = block_width(numel, block_size)
        carried = as_blocks(x.reshape(-1).float() + error.view(-1), width)  # [B, width]
        return self._code_blocks(carried, error, None)

    def quantize_ref(self, x: Tensor, block_size: int = 1024) -> tuple[Tensor, Tensor]:
        """The definition of ``<codec>_quantize``: ``compress`` without an error."""
        return self.compress_ref(x, x.new_zeros(x.numel(), dtype=torch.float32), block_size)

    def decompress_ref(
        self, codes: Tensor, scales: Tensor, numel: int, block_size: int = 1024
    ) -> Tensor:
        """The definition of ``<codec>_decompress``."""
        if numel == 0:
            return scales.new_empty(0)
        scale = scales.reshape(-1, 1).expand(-1, block_width(numel, block_size)).reshape(-1)[:numel]
        units = self.decode(self._unpack(codes.reshape(-1), numel))
        # One NaN, whatever the machine makes of NaN * scale.
        return torch.where(units.isnan() | ~scale.isfinite(), NAN, units * scale)

    def decompress_into_ref(
        self, codes: Tensor, scales: Tensor, block_size: int, out: Tensor
    ) -> None:
        """The definition: ``<codec>_decompress`` into memory that is there already."""
        op = getattr(torch.ops.mcp_kernels, f"{self.name}_decompress")
        out.copy_(op(codes, scales, out.numel(), block_size).view(out.shape))

    def reduce_ref(
        self,
        codes: Tensor,
        scales: Tensor,
        server_error: Tensor,
        counts: Tensor | None,
        block_size: int,
    ) -> tuple[Tensor, Tensor]:
        """The definition of ``<codec>_reduce``."""
        numel = server_error.numel()
        if numel == 0:
            return self._empty(server_error, numel, block_size)
        width = block_width(numel, block_size)
        if counts is None:
            counts = block_counts(numel, width, codes.device)
        valid = is_valid(counts, width)  # [B, width]

        def decode(rank: int) -> Tensor:
            return as_blocks(
                self.decompress_ref(codes[rank], scales[rank], numel, block_size), width
            )

        mean = mean_of_ranks(decode, codes.shape[0])
        carried = torch.where(valid, mean + as_blocks(server_error.view(-1), width), 0.0)
        return self._code_blocks(carried, server_error, valid)

    def definitions(self) -> list[tuple[str, dict[str, Any]]]:
        """Schema, reference and fake of each op, as ``define_op`` takes them."""
        compress = (
            f"{self.name}_compress(Tensor x, Tensor(a!) error, SymInt block_size=1024) "
            f"-> (Tensor codes, Tensor scales)"
        )
        decompress = (
            f"{self.name}_decompress(Tensor codes, Tensor scales, SymInt numel, "
            f"SymInt block_size=1024) -> Tensor"
        )
        decompress_into = (
            f"{self.name}_decompress_into(Tensor codes, Tensor scales, SymInt block_size, "
            f"Tensor(a!) out) -> ()"
        )
        reduce = (
            f"{self.name}_reduce(Tensor codes, Tensor scales, Tensor(a!) server_error, "
            f"Tensor? counts, SymInt block_size) -> (Tensor codes, Tensor scales)"
        )

        quantize = (
            f"{self.name}_quantize(Tensor x, SymInt block_size=1024) "
            f"-> (Tensor codes, Tensor scales)"
        )

        def compress_fake(x: Tensor, error: Tensor, block_size: int = 1024) -> Any:
            return self._empty(x, x.numel(), block_size)

        def quantize_fake(x: Tensor, block_size: int = 1024) -> Any:
            return self._empty(x, x.numel(), block_size)

        def decompress_fake(
            codes: Tensor, scales: Tensor, numel: int, block_size: int = 1024
        ) -> Any:
            return scales.new_empty(numel)

        def into_fake(codes: Tensor, scales: Tensor, block_size: int, out: Tensor) -> None:
            return None

        def reduce_fake(
            codes: Tensor,
            scales: Tensor,
            server_error: Tensor,
            counts: Tensor | None,
            block_size: int,
        ) -> Any:
            return self._empty(server_error, server_error.numel(), block_size)

        return [
            (compress, {"reference": self.compress_ref, "fake": compress_fake}),
            (quantize, {"reference": self.quantize_ref, "fake": quantize_fake}),
            (decompress, {"reference": self.decompress_ref, "fake": decompress_fake}),
            (decompress_into, {"reference": self.decompress_into_ref, "fake": into_fake}),
            (reduce, {"reference": self.reduce_ref, "fake": reduce_fake}),
        ]

    def _code_blocks(
        self, carried: Tensor, error: Tensor, valid: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Codes and scales of ``[B, width]`` values, 0 where not valid; updates the error."""
        scales = block_amax(carried, self.largest)
        has_scale = (scales > 0)[:, None]  # False for NaN
        units = (carried / scales[:, None]).clamp(-self.largest, self.largest)
        codes = self.encode(torch.where(has_scale, units, 0.0))  # [B, width]
        sent = torch.where(has_scale, self.decode(codes) * scales[:, None], 0.0)
        keep_error(error, carried, sent, scales, valid)
        return self._pack(codes.view(-1)[: error.numel()]), scales

    def _pack(self, codes: Tensor) -> Tensor:
        if self.bits_each == 8:
            return codes.clone()
        pairs = torch.nn.functional.pad(codes, (0, codes.numel() % 2)).view(-1, 2)
        return pairs[:, 0] | (pairs[:, 1] << 4)

    def _unpack(self, packed: Tensor, numel: int) -> Tensor:
        if self.bits_each == 8:
            return packed
        return torch.stack((packed & 15, packed >> 4), dim=1).view(-1)[:numel]

    def _empty(self, like: Tensor, numel: int, block_size: int) -> tuple[Tensor, Tensor]:
        """Uninitialised codes and scales, for sizes that may be symbolic."""
        num_blocks = (numel + block_size - 1) // block_size
        codes = like.new_empty(num_code_bytes(numel, self.bits_each), dtype=torch.uint8)
        return codes, like.new_empty(num_blocks, dtype=torch.float32)
