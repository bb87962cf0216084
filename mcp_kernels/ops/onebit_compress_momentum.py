"""Momentum update and sign compression with error feedback, in one pass, many tensors a call.

After the first compressed step of 1-bit Adam the momentum is what was sent: a sign an element and
a scale a block. It is kept as those codes, so this step reads 1 bit an element where a float32
momentum takes 4 bytes, twice.

Given a frozen preconditioner, the momentum is of preconditioned gradients: a sign moves every
element of a block by as much, so elements had better be of one size when they are coded.

Source: Tang et al., "1-bit Adam" (ICML 2021, arXiv 2102.02888), section 4; coding what Adam applies
instead of what it averages: Chen et al., "Quantized Adam with Error Feedback" (2021, arXiv
2004.14180).

Letters: P = padded elements of the buffer, B = its blocks = P / block_size. Tensors lie in it as
``BlockLayout`` has them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mcp_kernels._op import define_op
from mcp_kernels.ops._blocks import (
    block_rms,
    is_valid,
    keep_error,
    pack_bits,
    signed_scale,
    unpack_bits,
)
from mcp_kernels.ops._codec_checks import (
    check_block_size,
    check_device,
    check_fits,
    check_flat_codes,
    check_floats,
    check_state,
)
from mcp_kernels.ops.block_layout import BlockLayout

OP = "onebit_compress_momentum"


def onebit_compress_momentum(
    grads: Sequence[Tensor],
    bits: Tensor,
    scales: Tensor,
    error: Tensor,
    *,
    beta1: float,
    grad_scale: float = 1,
    block_size: int = 1024,
    preconditioner: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Update the momentum with ``grads``, add the error, and pack the sign of the sum.

    ``c = (beta1 * m + (1 - beta1) * g) + error`` with ``g = grad * grad_scale``, times the
    preconditioner where there is one, and ``m`` what the codes say; each product and each sum is
    rounded to float32, and ``1 - beta1`` is rounded once.
    Then as ``onebit_compress``: bits of c, the block's root mean square, the rest as new error.

    Args:
        grads: local gradients, float32, bfloat16 or float16 (each its own), any shape and strides,
            read in logical order. Each starts at a block: ``BlockLayout`` tells where.
        bits: ``[P / 8]`` uint8, signs of the momentum.
        scales: ``[B]`` float32; a block of scale 0 has momentum 0.
        error: ``[P]`` float32, contiguous, **updated in place** where a tensor has elements. A bad
            block keeps its error.
        beta1: decay of the momentum.
        grad_scale: factor of the gradients: clipping, loss scale, accumulation. The default is
            an int because torch.compile, where all is dynamic, makes a symbol of a float.
        block_size: elements that share a scale, a positive multiple of 8.
        preconditioner: ``[P]`` bfloat16, contiguous: factors of the gradients' elements.

    Returns:
        bits: ``[P / 8]`` uint8, 0 in padding.
        scales: ``[B]`` float32, 0 for a block of padding alone, NaN for a block that holds a NaN
            or an infinity.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument breaks another rule above.

    Cost: one pass over memory for blocks up to 4096 elements: 8.125 bytes read and 4.125 written
        an element of float32 gradient, and 2 read of a preconditioner.
    """
    check_block_size(OP, block_size)
    padded_numel = check_flat_codes(OP, bits, scales, block_size)
    check_state(OP, "error", error, bits.device)
    if error.numel() != padded_numel:
        raise ValueError(f"{OP}: error must have {padded_numel} elements, got {error.numel()}")
    if preconditioner is not None:
        check_state(OP, "preconditioner", preconditioner, bits.device, torch.bfloat16)
        if preconditioner.numel() != padded_numel:
            raise ValueError(
                f"{OP}: preconditioner must have {padded_numel} elements, got "
                f"{preconditioner.numel()}"
            )
    grads = list(grads)
    for grad in grads:
        check_floats(OP, grad, "grads")
        check_device(OP, "grads", grad, bits.device)
    check_fits(OP, "grads", grads, scales.numel(), block_size)
    return torch.ops.mcp_kernels.onebit_compress_momentum(
        [grad.detach() for grad in grads],
        *(bits, scales, error, float(beta1), float(grad_scale), block_size, preconditioner),
    )


def onebit_compress_momentum_ref(
    grads: Sequence[Tensor],
    bits: Tensor,
    scales: Tensor,
    error: Tensor,
    beta1: float,
    grad_scale: float,
    block_size: int,
    preconditioner: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition; every other body is held to its bits."""
    num_blocks = scales.numel()
    if num_blocks == 0:
        return torch.empty_like(bits), torch.empty_like(scales)
    layout = BlockLayout([grad.numel() for grad in grads], block_size)
    counts = bits.new_zeros(num_blocks, dtype=torch.int64)
    counts[: layout.num_blocks] = layout.counts(bits.device)
    valid = is_valid(counts, block_size)  # [B, block_size]

    flat = torch.zeros_like(error).view(-1)
    for grad, at in zip(grads, layout.offsets, strict=True):
        flat[at : at + grad.numel()] = grad.reshape(-1).float()
    positive = unpack_bits(bits, error.numel()).view(num_blocks, block_size)
    momentum = signed_scale(positive, scales)
    flat *= grad_scale
    if preconditioner is not None:
        flat *= preconditioner.view(-1).float()
    update = momentum * beta1 + flat.view_as(momentum) * (1 - beta1)
    carried = torch.where(valid, update + error.view_as(momentum), 0.0)

    new_scales = block_rms(carried, counts)
    new_positive = (carried >= 0) & valid
    keep_error(error, carried, signed_scale(new_positive, new_scales), new_scales, valid)
    return pack_bits(new_positive.view(-1)), new_scales


def _fake(
    grads: Sequence[Tensor],
    bits: Tensor,
    scales: Tensor,
    error: Tensor,
    beta1: float,
    grad_scale: float,
    block_size: int,
    preconditioner: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return bits.new_empty(bits.numel()), scales.new_empty(scales.numel())


define_op(
    "onebit_compress_momentum(Tensor[] grads, Tensor bits, Tensor scales, Tensor(a!) error, "
    "float beta1, float grad_scale, SymInt block_size, Tensor? preconditioner=None) "
    "-> (Tensor bits, Tensor scales)",
    reference=onebit_compress_momentum_ref,
    fake=_fake,
)
