"""Triton attention in 16-bit types: backward errs by the two roundings it cannot do without.

P is rounded before it is multiplied by dO, dS before q and k, and each gradient once at the end.
The same roundings of the exact P and dS, with all else in float64, are what the kernels are held
to; nothing else, such as a delta taken from the rounded output, may add to that.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from test_attention import Case
from torch import Tensor
from triton_attention import (
    IGNORE_NUMPY,
    NAMES,
    gradients,
    op_args,
    output_gradient,
    relative_error,
    tiles_of,
    widen,
)

import mcp_kernels

pytestmark = pytest.mark.filterwarnings(IGNORE_NUMPY)

# What gradients of causal attention may be off in all, relative, in the norm. The two roundings are
# 2.35e-3 of it; in float16, with three bits more, an eighth.
RULE = {torch.bfloat16: 2.5e-3, torch.float16: 2.5e-3 / 8}
# A rounding of P that differs from the kernel's since float32 P lies on the other side of a tie.
SLACK = 1.03


def _rounded_twice(args: tuple[Any, ...], dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in float64 but for P, dS and the results, which are rounded."""
    dtype = args[0].dtype
    q, k, v, bias, slopes, sink, rng, *options = widen(args)
    (batch, rows, heads, _), keys = q.shape, k.shape[1]
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros(bias.shape).double().masked_fill(~bias, -math.inf)
    bias = q.new_zeros(1, 1, 1, 1) if bias is None else bias
    bias = bias.expand(batch, heads, rows, keys)
    rest = (bias, slopes, sink, rng)
    ops = torch.ops.mcp_kernels
    with mcp_kernels.reference_only():
        # Values e_j give the probabilities themselves; dbias is dS.
        eye = torch.eye(keys).double()[None, :, None].expand(batch, keys, k.shape[2], keys)
        p = ops.flash_attn(q, k, eye, *rest, *options)[0].transpose(1, 2)
        out, lse = ops.flash_attn(q, k, v, *rest, *options)
        wide = dout.double()
        ds = ops.flash_attn_bwd(wide, None, q, k, v, out, lse, *rest, True, *options)[3]
    p, ds = (t.to(dtype).double() for t in (p, ds))
    ds *= options[0]
    by_group = (batch, k.shape[2], heads // k.shape[2], keys, -1)
    q, k, wide = (t.transpose(1, 2) for t in (q, k, wide))
    dq = ds @ k.repeat_interleave(by_group[2], dim=1)
    dk, dv = ((t.mT @ by).reshape(by_group).sum(2) for t, by in ((ds, q), (p, wide)))
    dq, dk, dv = (t.transpose(1, 2).to(dtype).double() for t in (dq, dk, dv))
    return dq, dk, dv


def _plain_gradients(args: tuple[Any, ...], dout: Tensor) -> tuple[Tensor, ...]:
    """(dq, dk, dv) of attention as one writes it in torch, in the dtype of q."""
    scale, left, right = args[7:10]
    q, k, v = leaves = [t.detach().requires_grad_() for t in args[:3]]
    group = q.shape[2] // k.shape[2]
    wide_k, wide_v = (t.repeat_interleave(group, dim=2).transpose(1, 2) for t in (k, v))
    s = (q.transpose(1, 2) @ wide_k.mT) * scale
    rows, keys = s.shape[-2:]
    distance = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)
    hidden = ((left >= 0) & (distance < -left)) | ((right >= 0) & (distance > right))
    p = s.masked_fill(hidden.to(s.device), -math.inf).softmax(-1)
    return torch.autograd.grad((p @ wide_v).transpose(1, 2), leaves, dout)


def _assert_two_roundings(args: tuple[Any, ...]) -> tuple[dict[str, float], tuple[Tensor, ...]]:
    """Hold each gradient to its roundings; (their errors, the exact gradients)."""
    with tiles_of(32, 32):
        got, wanted = gradients(args, has_dlse=False)
    rounded = _rounded_twice(args, output_gradient(args))
    errors = {}
    for name, actual, expected, by_rounding in zip(NAMES[:3], got, wanted, rounded, strict=False):
        assert actual.dtype == args[0].dtype
        errors[name] = relative_error(actual, expected)
        assert errors[name] <= SLACK * relative_error(by_rounding, expected), name
    return errors, wanted


CAUSAL: dict[str, Any] = {"causal": True}
CALLS = [
    ((1, 33, 33, 2, 2, 16, 16), CAUSAL, torch.bfloat16),
    ((1, 96, 96, 2, 1, 40, 64), CAUSAL, torch.bfloat16),
    ((1, 96, 96, 2, 1, 40, 64), CAUSAL, torch.float16),
    ((1, 96, 96, 2, 1, 40, 64), {"window_size": (20, 5)}, torch.bfloat16),
    ((1, 100, 130, 2, 1, 64, 64), CAUSAL, torch.bfloat16),
    ((1, 96, 96, 1, 1, 128, 128), CAUSAL, torch.bfloat16),
]


@pytest.mark.parametrize(("sizes", "kwargs", "dtype"), CALLS, ids=str)
def test_backward(sizes: tuple[int, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> None:
    args = op_args(Case("narrow", sizes=sizes, kwargs=kwargs), dtype)
    errors, wanted = _assert_two_roundings(args)
    by_torch = _plain_gradients(args, output_gradient(args))
    for name, plain, expected in zip(NAMES[:3], by_torch, wanted, strict=False):
        assert errors[name] <= relative_error(plain, expected), name
    if sizes[1] > 90:  # the error of fewer rows is no mean of many roundings
        assert max(errors.values()) <= RULE[dtype], errors


@pytest.mark.parametrize("features", ["bias", "mask", "alibi_sink", "dropout", "wide_values"])
def test_backward_with_features(features: str) -> None:
    sizes = (1, 60, 75, 2, 1, 24, 32)
    case = {
        "bias": Case("bias", sizes=sizes, bias=(1, 2, 60, 75)),
        "mask": Case("mask", sizes=sizes, bias=(1, 1, 60, 75), bias_is_bool=True),
        "alibi_sink": Case("alibi", sizes=sizes, alibi=(2,), has_sink=True),
        "dropout": Case("dropout", sizes=sizes, kwargs={"causal": True}),
        # dV and dK in passes of their own.
        "wide_values": Case("wide", sizes=(1, 40, 50, 2, 1, 100, 128), kwargs={"causal": True}),
    }[features]
    dropout_p = 0.2 if features in ("dropout", "wide_values") else 0.0
    _assert_two_roundings(op_args(case, torch.bfloat16, dropout_p=dropout_p))
