"""onebit_adam_update in Triton: the bits of every other body, one launch a tensor."""

# Triton types its kernels as the functions they are written as, not as what a launch takes.
# pyright: reportArgumentType=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN202, PLR0913

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from mcp_kernels.triton.codec_blocks import ELEMENTS_PER_PROGRAM, signed


@triton.jit
def _onebit_adam_update_kernel(
    param_ptr,
    weight_ptr,
    denom_ptr,
    moves_ptr,
    bits_ptr,
    scales_ptr,
    numel,
    block_size,
    decay,
    step_size,
    HAS_MASTER: tl.constexpr,
    DIVIDES: tl.constexpr,
    IS_MASKED: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    valid = i < numel
    step = step_size * tl.load(scales_ptr + i // block_size, mask=valid, other=0.0)
    update = signed(bits_ptr, i, valid, step)
    if DIVIDES:
        update = tl.div_rn(update, tl.load(denom_ptr + i, mask=valid, other=1.0))
    if IS_MASKED:
        update = tl.where(signed(moves_ptr, i, valid, 1.0) > 0, update, 0.0)
    moved = tl.load(weight_ptr + i, mask=valid, other=0.0) * decay - update
    tl.store(weight_ptr + i, moved, mask=valid)
    if HAS_MASTER:
        tl.store(param_ptr + i, moved.to(param_ptr.dtype.element_ty), mask=valid)


def onebit_adam_update(
    params: Sequence[Tensor],
    denom: Tensor | None,
    bits: Tensor,
    scales: Tensor,
    lr: float,
    step_size: float,
    weight_decays: Sequence[float],
    block_size: int,
    master: Tensor | None = None,
    moves: Tensor | None = None,
) -> None:
    """The Triton body of ``onebit_adam_update``; arguments as there, checked before."""
    flat_bits, flat_scales = bits.reshape(-1), scales.reshape(-1)
    # A kernel takes a pointer even where it reads none.
    flat_denom = flat_scales if denom is None else denom.view(-1)
    flat_moves = flat_bits if moves is None else moves.reshape(-1)
    first_block = 0
    for param, weight_decay in zip(params, weight_decays, strict=True):
        numel, at = param.numel(), first_block * block_size
        first_block += triton.cdiv(numel, block_size)
        if numel == 0:
            continue
        dense = param.contiguous().view(-1)
        weights = dense if master is None else master.view(-1)[at : at + numel]
        _onebit_adam_update_kernel[(triton.cdiv(numel, ELEMENTS_PER_PROGRAM),)](
            *(dense, weights, flat_denom if denom is None else flat_denom[at:]),
            *(flat_moves[at // 8 :], flat_bits[at // 8 :]),
            *(flat_scales[at // block_size :], numel, block_size),
            *(1 - lr * weight_decay, step_size),
            HAS_MASTER=master is not None,
            DIVIDES=denom is not None,
            IS_MASKED=moves is not None,
            ELEMENTS=ELEMENTS_PER_PROGRAM,
            enable_fp_fusion=False,
        )
        if not param.is_contiguous():
            param.copy_(dense.view(param.shape))
