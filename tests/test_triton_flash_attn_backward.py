"""The Triton backward kernels: every gradient against the reference in float64, in the interpreter.

A gradient is a sum of products of float32 results, rounded once at the end: its relative error in
the norm is a small multiple of float32's roundoff u. 16-bit types have a file of their own,
test_triton_flash_attn_narrow.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from test_attention import CASES, Case
from torch import Tensor
from triton_attention import (
    DEVICE,
    IGNORE_NUMPY,
    NAMES,
    exact,
    gradients,
    op_args,
    relative_error,
    tiles_of,
)

import mcp_kernels
from mcp_kernels.triton import flash_attn as body

pytestmark = pytest.mark.filterwarnings(IGNORE_NUMPY)

# A few hundred u, as the reference in float32 is held to.
FLOAT32_BOUND = 300 * 2.0**-24


def _assert_float32_close(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for name, actual, expected in zip(NAMES, got, wanted, strict=True):
        # Where the exact sum cancels to (nearly) nothing, its terms of size 1 bound the error.
        error = float((actual.double() - expected).norm())
        floor = 1e-3 * expected.numel() ** 0.5
        assert error <= FLOAT32_BOUND * max(float(expected.norm()), floor), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_feature(case: Case, poisoned_memory: None) -> None:
    _assert_float32_close(*gradients(op_args(case, torch.float32)))


SHAPES = [(1, 37, 45, 4, 2, 24, 20), (2, 49, 32, 1, 1, 59, 59), (1, 17, 50, 3, 1, 1, 3)]
KWARGS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "causal_align": "top_left", "softcap": 0.7},
    {"window_size": (20, 3)},
    {"window_size": (5, 20), "causal_align": "top_left", "softmax_scale": -0.5},
]


@pytest.mark.parametrize("kwargs", KWARGS, ids=str)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_many_tiles(sizes: tuple[int, ...], kwargs: dict[str, Any], poisoned_memory: None) -> None:
    args = op_args(Case("tiles", sizes=sizes, kwargs=kwargs, has_sink=True), torch.float32)
    with tiles_of(16, 16):
        _assert_float32_close(*gradients(args))


@pytest.mark.parametrize(
    "bias", [(2, 2, 20, 35), (1, 2, 20, 35), (2, 1, 1, 35), (1, 1, 20, 1), (1, 1, 1, 1)], ids=str
)
def test_bias_gradient_sums_what_was_broadcast(bias: tuple[int, ...]) -> None:
    case = Case("bias", sizes=(2, 20, 35, 2, 1, 8, 8), bias=bias, kwargs={"causal": True})
    with tiles_of(16, 16):
        _assert_float32_close(*gradients(op_args(case, torch.float32, dropout_p=0.2)))


@pytest.mark.parametrize("p", [0.3, 1.0])
def test_dropout(p: float) -> None:
    case = Case("dropout", sizes=(2, 18, 40, 2, 1, 8, 8), kwargs={"causal": True})
    with tiles_of(16, 16):
        _assert_float32_close(*gradients(op_args(case, torch.float32, dropout_p=p)))


def test_rows_of_hugely_negative_scores() -> None:
    """exp(0 - lse) is infinite: a key past the end that is not masked turns dq into NaN."""
    args = list(op_args(Case("negative", sizes=(1, 20, 37, 2, 1, 8, 8)), torch.float32))
    args[0], args[1] = args[0].abs() * 30, args[1].abs() * -30
    with tiles_of(16, 16):
        got, wanted = gradients(tuple(args))
    # A score of some thousands is off by its own roundoff, and every gradient with it.
    _, lse = exact("flash_attn", tuple(args))
    allowed = FLOAT32_BOUND * (1 + float(lse.abs().max()))
    for name, actual, expected in zip(NAMES[:3], got, wanted, strict=False):
        assert relative_error(actual, expected) <= allowed, name


# Each type has deltas of its own.
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float32) for kind in ("causal", "window", "bool")),
        ("causal", torch.float16),
        ("window", torch.bfloat16),
    ],
    ids=str,
)
def test_hidden_nan_reaches_nothing(kind: str, dtype: torch.dtype) -> None:
    """Bad keys, values, rows of q and dO: only pairs that see them are spoiled."""
    kwargs = {"causal": {"causal": True}, "window": {"window_size": (2, 2)}}.get(kind, {})
    case = Case("nan", sizes=(1, 40, 40, 1, 1, 8, 8), kwargs=kwargs)
    q, k, v, bias, *rest = op_args(case, dtype)
    position = torch.arange(40, device=DEVICE)
    distance = position[:, None] - position
    sees = {"causal": distance >= 0, "window": distance.abs() <= 2}.get(kind, distance % 3 == 0)
    if kind == "bool":
        bias = sees[None, None]
    options = rest[3:]

    def run(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        out, lse = body.flash_attn(q, k, v, bias, *rest)
        return body.flash_attn_bwd(dout, None, q, k, v, out, lse, bias, *rest[:3], False, *options)[
            :3
        ]

    generator = torch.Generator().manual_seed(3)
    dout = torch.randn(1, 40, 1, 8, generator=generator).to(dtype).to(DEVICE)
    with tiles_of(16, 16):
        clean = run(q, k, v, dout)
        for spoiled in range(4):
            inputs = [t.clone() for t in (q, k, v, dout)]
            inputs[spoiled][0, 20] = math.nan
            dq, dk, dv = run(inputs[0], inputs[1], inputs[2], inputs[3])
            if spoiled in (1, 2):  # key 20: rows that see it, and keys that such rows see
                rows = sees[:, 20]
                keys = (sees & rows[:, None]).any(0)
            else:  # row 20, and the keys it sees
                rows, keys = position == 20, sees[20]
            assert torch.equal(dq[:, ~rows], clean[0][:, ~rows])
            assert torch.equal(dk[:, ~keys], clean[1][:, ~keys])
            assert torch.equal(dv[:, ~keys], clean[2][:, ~keys])
            assert not dq[:, rows].isfinite().any()


def test_same_bits_every_time_and_strides_of_dout() -> None:
    """dO of ``out.sum()`` is one element, expanded."""
    args = op_args(Case("bits", sizes=(2, 20, 33, 4, 2, 8, 6)), torch.float32)
    q, k, v, *rest = args
    with tiles_of(16, 16):
        out, lse = body.flash_attn(*args)
        one = torch.ones((), device=DEVICE)
        dlse = torch.full((), 0.5, device=DEVICE).expand(lse.shape)
        results = [
            body.flash_attn_bwd(dout, dl, q, k, v, out, lse, *rest[:4], False, *rest[4:])
            for dout, dl in (
                (one.expand(out.shape), dlse),
                (torch.ones_like(out), dlse.contiguous()),
            )
        ]
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_an_infinite_key_is_not_taken_for_zero() -> None:
    """Its scores are -inf and forward is finite; dq has 0 * inf, as in the reference."""
    args = op_args(
        Case("inf", sizes=(1, 20, 20, 1, 1, 4, 4), kwargs={"causal": True}), torch.float32
    )
    q, k, v, *rest = args
    q, k = q.abs() + 0.1, k.clone()
    k[0, 10] = -math.inf
    with tiles_of(16, 16):
        out, lse = body.flash_attn(q, k, v, *rest)
        dq, *_ = body.flash_attn_bwd(out, None, q, k, v, out, lse, *rest[:4], False, *rest[4:])
    assert out.isfinite().all()
    assert dq[0, :10].isfinite().all()
    assert not dq[0, 10:].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_part_of_the_keys_takes_the_delta_of_all(dtype: torch.dtype) -> None:
    """A block of ring attention: gradients of two parts of the keys add up to the whole's."""
    args = op_args(Case("part", sizes=(2, 20, 48, 4, 2, 8, 6)), dtype)
    q, k, v, *rest = args
    generator = torch.Generator().manual_seed(4)
    dout = torch.randn(2, 20, 4, 6, generator=generator).to(dtype).to(DEVICE)
    out, lse = exact("flash_attn", args)
    delta = (dout.double() * out).sum(-1).transpose(1, 2)
    with tiles_of(16, 16):
        parts = [
            body.flash_attn_bwd(
                dout,
                None,
                q,
                k[:, keys],
                v[:, keys],
                out.to(dtype),
                lse.float(),
                *rest[:4],
                False,
                *rest[4:],
                delta.float(),
            )[:3]
            for keys in (slice(19), slice(19, None))
        ]
    (dq, dk, dv), (dq_2, dk_2, dv_2) = parts
    got = dq.double() + dq_2.double(), torch.cat([dk, dk_2], 1), torch.cat([dv, dv_2], 1)
    wide = [t.double() for t in (dout, q, k, v, out, lse)]
    with mcp_kernels.reference_only():
        wanted = torch.ops.mcp_kernels.flash_attn_bwd(
            wide[0], None, *wide[1:], *rest[:4], False, *rest[4:]
        )
    # float16: four roundings in a row (P, dS, the parts, their sum), each half of eps.
    bound = FLOAT32_BOUND if dtype == torch.float32 else 2 * 2.0**-10
    for actual, expected in zip(got, wanted[:3], strict=True):
        assert relative_error(actual, expected) <= bound
