"""Argument checks of the codecs' public functions: who, which rule, what came, the way out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mcp_kernels._transforms import wants_gradient

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_block_size(op: str, block_size: int) -> None:
    """A positive multiple of 8."""
    check_int(op, "block_size", block_size)
    if block_size <= 0 or block_size % 8:
        nearest = max(8, int(block_size) // 8 * 8)
        raise ValueError(
            f"{op}: block_size must be a positive multiple of 8, got {block_size}; use {nearest}"
        )


def check_int(op: str, name: str, value: int) -> None:
    """A whole number, which may be symbolic; True is none."""
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be an int, got {type(value).__name__}")


def check_tensor(op: str, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """A tensor of one dtype."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, got {type(tensor).__name__}")
    if tensor.dtype != dtype:
        raise TypeError(f"{op}: {name} must be {dtype}, got {tensor.dtype}")


def check_floats(op: str, x: Tensor, name: str = "x") -> None:
    """A strided tensor of one of the types that codecs read."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, got {type(x).__name__}")
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"{op}: {name} must be float32, bfloat16 or float16, got {x.dtype}; "
            f"convert it by {name}.float()"
        )
    if x.layout != torch.strided:
        raise ValueError(
            f"{op}: {name} must be a strided tensor, got {x.layout}; "
            f"convert it by {name}.to_dense()"
        )


def check_error(op: str, x: Tensor, error: Tensor) -> None:
    """A float32 buffer as large as ``x``, which the op may update in place."""
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
    check_no_grad(op, "error", error)


def check_state(
    op: str,
    name: str,
    state: Tensor,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> None:
    """A flat buffer of ``dtype`` on ``device``, which the op may update in place."""
    check_tensor(op, name, state, dtype)
    check_device(op, name, state, device)
    if state.layout != torch.strided or not state.is_contiguous():
        raise ValueError(f"{op}: {name} must be contiguous; make it by flat_buffer(numel)")
    check_no_grad(op, name, state)


def check_no_grad(op: str, name: str, state: Tensor) -> None:
    """What is updated in place must not be part of a graph."""
    if wants_gradient(state):
        raise ValueError(
            f"{op}: {name} must not require grad since it is updated in place, got "
            f"requires_grad=True; pass {name}.detach()"
        )


def check_device(op: str, name: str, tensor: Tensor, device: torch.device) -> None:
    """All tensors of a call lie on one device."""
    if tensor.device != device:
        raise ValueError(f"{op}: {name} must be on {device} as the rest is, got {tensor.device}")


def num_code_bytes(numel: int, bits_each: int) -> int:
    """Bytes of the codes of ``numel`` elements."""
    return (numel * bits_each + 7) // 8


def check_packed(
    op: str,
    codes: tuple[str, Tensor],
    scales: Tensor,
    numel: int,
    block_size: int,
    *,
    bits_each: int,
) -> None:
    """Codes and scales of ``numel`` elements; ``codes`` comes with the name of its argument."""
    name, packed = codes
    check_tensor(op, name, packed, torch.uint8)
    check_tensor(op, "scales", scales, torch.float32)
    check_int(op, "numel", numel)
    if numel < 0:
        raise ValueError(f"{op}: numel must be >= 0, got {numel}")
    num_bytes = num_code_bytes(numel, bits_each)
    num_blocks = (numel + block_size - 1) // block_size
    if packed.numel() != num_bytes:
        raise ValueError(
            f"{op}: {name} must be {num_bytes} bytes for numel={numel}, got {packed.numel()}"
        )
    if scales.numel() != num_blocks:
        raise ValueError(
            f"{op}: scales must be {num_blocks} values for numel={numel} and "
            f"block_size={block_size}, got {scales.numel()}"
        )
    if packed.device != scales.device:
        raise ValueError(
            f"{op}: scales must be on the device of {name} ({packed.device}), got {scales.device}"
        )


def check_flat_codes(op: str, bits: Tensor, scales: Tensor, block_size: int) -> int:
    """1-bit codes of a block layout, in memory order; gives its elements."""
    check_tensor(op, "bits", bits, torch.uint8)
    check_tensor(op, "scales", scales, torch.float32)
    check_device(op, "scales", scales, bits.device)
    padded_numel = scales.numel() * block_size
    if bits.numel() * 8 != padded_numel:
        raise ValueError(
            f"{op}: bits must be {padded_numel // 8} bytes for {scales.numel()} blocks of "
            f"{block_size}, got {bits.numel()}"
        )
    return padded_numel


def check_fits(op: str, name: str, tensors: Sequence[Tensor], num_blocks: int, size: int) -> None:
    """The blocks of ``tensors``, each rounded up, are there."""
    needed = sum((tensor.numel() + size - 1) // size for tensor in tensors)
    if needed > num_blocks:
        raise ValueError(
            f"{op}: {name} must fit {num_blocks} blocks of {size}, got {needed}; "
            f"make the buffers by BlockLayout([t.numel() for t in {name}], {size})"
        )


def check_reduce(
    op: str,
    codes: tuple[str, Tensor],
    scales: Tensor,
    server_error: Tensor,
    counts: Tensor | None,
    block_size: int,
    *,
    bits_each: int,
) -> None:
    """``[W, bytes]`` codes, ``[W, blocks]`` scales, and the chunk's own error and counts."""
    name, packed = codes
    check_tensor(op, name, packed, torch.uint8)
    check_tensor(op, "scales", scales, torch.float32)
    check_state(op, "server_error", server_error, packed.device)
    check_device(op, "scales", scales, packed.device)
    numel = server_error.numel()
    num_bytes = num_code_bytes(numel, bits_each)
    num_blocks = (numel + block_size - 1) // block_size
    if packed.dim() != 2 or packed.shape[0] < 1 or packed.shape[1] != num_bytes:
        raise ValueError(
            f"{op}: {name} must be [W, {num_bytes}] for a chunk of {numel} elements, "
            f"got {list(packed.shape)}"
        )
    if list(scales.shape) != [packed.shape[0], num_blocks]:
        raise ValueError(
            f"{op}: scales must be [{packed.shape[0]}, {num_blocks}] for blocks of {block_size}, "
            f"got {list(scales.shape)}"
        )
    if counts is None:
        return
    check_tensor(op, "counts", counts, torch.int32)
    check_device(op, "counts", counts, packed.device)
    if counts.numel() != num_blocks or numel != num_blocks * block_size:
        raise ValueError(
            f"{op}: counts must be {num_blocks} values for whole blocks of {block_size}, got "
            f"{counts.numel()} for a chunk of {numel} elements"
        )
