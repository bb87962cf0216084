"""The parameter step of 1-bit Adam after the switch, from a momentum of codes.

The codes are of preconditioned gradients (``onebit_compress_momentum``), so they are the step; or
of plain ones, and the frozen divisor is applied here, as the paper has it.

Source: Tang et al., "1-bit Adam" (ICML 2021, arXiv 2102.02888), algorithm 1, with decoupled weight
decay as torch's AdamW has it.

Letters: P = padded elements of the buffer, B = its blocks = P / block_size. Tensors lie in it as
``BlockLayout`` has them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mcp_kernels._op import define_op
from mcp_kernels.ops._blocks import signed_scale, unpack_bits
from mcp_kernels.ops._codec_checks import (
    check_block_size,
    check_device,
    check_fits,
    check_flat_codes,
    check_floats,
    check_no_grad,
    check_state,
    check_tensor,
)
from mcp_kernels.ops.block_layout import BlockLayout

OP = "onebit_adam_update"


def onebit_adam_update(
    params: Sequence[Tensor],
    denom: Tensor | None,
    bits: Tensor,
    scales: Tensor,
    *,
    lr: float,
    step_size: float,
    weight_decays: Sequence[float],
    block_size: int = 1024,
    master: Tensor | None = None,
    moves: Tensor | None = None,
) -> None:
    """Move every parameter by its decoded momentum, over the frozen denominator if there is one.

    ``p = p * (1 - lr * weight_decay) - (step_size * m) / denom``: the factor of the decay is
    rounded to float32 once, then each operation is. An infinite ``denom`` makes the second term 0,
    and so does a cleared bit of ``moves``. A scale of NaN makes its block's parameters NaN: a step
    with a bad block must be skipped.

    Args:
        params: tensors **updated in place**, any strides, in the order and at the blocks of
            ``BlockLayout``; float32, or any of float32, bfloat16 and float16 where ``master`` is
            given.
        denom: ``[P]`` float32, ``sqrt(v_hat) + eps``, frozen; +inf masks a coordinate. None: the
            momentum is of preconditioned gradients, and nothing is divided.
        bits: ``[P / 8]`` uint8, signs of the averaged momentum.
        scales: ``[B]`` float32.
        lr: learning rate, of the weight decay alone.
        step_size: learning rate over the momentum's bias correction.
        weight_decays: one a parameter.
        block_size: elements that share a scale, a positive multiple of 8.
        master: ``[P]`` float32 master weights, **updated in place**; ``params`` become their
            rounding (to nearest, ties to even).
        moves: ``[P / 8]`` uint8, packed as ``bits``: 0 masks a coordinate, which only decays. None
            masks nothing.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument breaks another rule above.

    Cost: one pass over memory: 4.125 bytes read and 4 written an element; 4 more for ``denom``, 1/8
        for ``moves``.
    """
    check_block_size(OP, block_size)
    padded_numel = check_flat_codes(OP, bits, scales, block_size)
    for name, flat in (("denom", denom), ("master", master)):
        if flat is not None:
            check_state(OP, name, flat, bits.device)
            if flat.numel() != padded_numel:
                raise ValueError(
                    f"{OP}: {name} must have {padded_numel} elements, got {flat.numel()}"
                )
    params, weight_decays = list(params), list(weight_decays)
    for param in params:
        check_floats(OP, param, "params")
        check_device(OP, "params", param, bits.device)
        if master is None and param.dtype != torch.float32:
            raise TypeError(
                f"{OP}: params must be float32 without master, got {param.dtype}; keep float32 "
                f"weights in a flat buffer and pass it as master"
            )
        if torch.is_grad_enabled():
            check_no_grad(OP, "params", param)
    if moves is not None:
        check_tensor(OP, "moves", moves, torch.uint8)
        check_device(OP, "moves", moves, bits.device)
        if moves.numel() != bits.numel():
            raise ValueError(f"{OP}: moves must have {bits.numel()} bytes, got {moves.numel()}")
    if len(weight_decays) != len(params):
        raise ValueError(
            f"{OP}: weight_decays must be {len(params)} values, one a parameter, got "
            f"{len(weight_decays)}"
        )
    check_fits(OP, "params", params, scales.numel(), block_size)
    torch.ops.mcp_kernels.onebit_adam_update(
        params,
        *(denom, bits, scales, float(lr), float(step_size)),
        *([float(decay) for decay in weight_decays], block_size, master, moves),
    )


def onebit_adam_update_ref(
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
    """The definition; every other body is held to its bits (a NaN is a NaN of any kind)."""
    layout = BlockLayout([param.numel() for param in params], block_size)
    numel = scales.numel() * block_size
    positive = unpack_bits(bits, numel).view(scales.numel(), block_size)
    step = (signed_scale(positive, scales.view(-1)) * step_size).view(-1)
    if denom is not None:
        step = step / denom.view(-1)
    if moves is not None:
        step = torch.where(unpack_bits(moves, numel), step, 0.0)
    for param, at, decay in zip(params, layout.offsets, weight_decays, strict=True):
        span = slice(at, at + param.numel())
        old = param if master is None else master.view(-1)[span].view(param.shape)
        new = old * (1 - lr * decay) - step[span].view(param.shape)
        if master is not None:
            master.view(-1)[span] = new.reshape(-1)
        param.copy_(new)


def _fake(
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
    return None


define_op(
    "onebit_adam_update(Tensor(a!)[] params, Tensor? denom, Tensor bits, Tensor scales, float lr, "
    "float step_size, float[] weight_decays, SymInt block_size, Tensor(b!)? master=None, "
    "Tensor? moves=None) -> ()",
    reference=onebit_adam_update_ref,
    fake=_fake,
)
