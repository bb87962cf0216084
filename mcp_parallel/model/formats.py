"""Formats in which a tensor waits for the backward pass, and what each may lose.

Most that an element x loses:

    none   nothing
    bf16   2^-8 |x|                     8 significant bits
    int8   max |block| / 254            half a step of 1/127 of the block's largest
    fp8    2^-4 |x|, or 2^-10 max |block| / 448 where that is more      E4M3

blocks being ``BLOCK_SIZE`` neighbours in memory. A value that is not finite makes its block NaN,
with bf16 only itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from mcp_kernels import fp8_decompress, fp8_quantize, int8_decompress, int8_quantize

Compression = Literal["none", "bf16", "int8", "fp8"]

# A scale takes 4 bytes a block: 1/64 of the codes' bytes. Longer blocks save little more and let
# one outlier coarsen more neighbours.
BLOCK_SIZE = 256


class Bf16:
    """Flat elements rounded to bfloat16."""

    def __init__(self, flat: Tensor) -> None:
        self.half = flat.to(torch.bfloat16)

    def decode(self, dtype: torch.dtype) -> Tensor:
        """The elements again, in ``dtype``."""
        return self.half.to(dtype)


class _Coded:
    """Flat elements as codes of a byte and a scale a block."""

    quantize: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    decompress: Callable[[Tensor, Tensor, int, int], Tensor]

    def __init__(self, flat: Tensor) -> None:
        flat = flat.float() if flat.dtype == torch.float64 else flat
        self.codes, self.scales = type(self).quantize(flat, BLOCK_SIZE)

    def decode(self, dtype: torch.dtype) -> Tensor:
        """The elements again, in ``dtype``."""
        decompress = type(self).decompress
        return decompress(self.codes, self.scales, self.codes.numel(), BLOCK_SIZE).to(dtype)


class Int8(_Coded):
    """Whole numbers of the block's scale."""

    quantize = staticmethod(int8_quantize)
    decompress = staticmethod(int8_decompress)


class Fp8(_Coded):
    """E4M3 numbers of the block's scale."""

    quantize = staticmethod(fp8_quantize)
    decompress = staticmethod(fp8_decompress)


class Whole:
    """Flat elements, all bits."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat.clone()

    def decode(self, dtype: torch.dtype) -> Tensor:
        """The elements again."""
        return self.flat.to(dtype)


class OnHost:
    """What ``kept`` holds, in host memory; pinned, so that copies run beside computation.

    Both copies are queued on the stream that computes, which orders them behind what makes the
    tensor and before what needs it.
    """

    def __init__(self, kept: Any, device: torch.device) -> None:
        self._kept, self._device = kept, device
        for name, tensor in vars(kept).items():
            host = torch.empty(
                tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda"
            )
            setattr(kept, name, host.copy_(tensor, non_blocking=True))

    def decode(self, dtype: torch.dtype) -> Tensor:
        """The elements again, on the device they came from."""
        back = object.__new__(type(self._kept))
        for name, tensor in vars(self._kept).items():
            setattr(back, name, tensor.to(self._device, non_blocking=True))
        return back.decode(dtype)


FORMATS: dict[str, Callable[[Tensor], Any]] = {
    "none": Whole,
    "bf16": Bf16,
    "int8": Int8,
    "fp8": Fp8,
}
# Of an element, the scales apart; "none" is never smaller.
BYTES_EACH = {"none": 8, "bf16": 2, "int8": 1, "fp8": 1}
