"""The Triton forward kernel against the reference in float64, in the interpreter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from test_attention import Case
from triton_attention import (
    DEVICE,
    IGNORE_NUMPY,
    assert_forward_close,
    exact,
    op_args,
    tiles_of,
)

from mcp_kernels.ops.attention_mask import dropout_keep
from mcp_kernels.triton import flash_attn as body

pytestmark = pytest.mark.filterwarnings(IGNORE_NUMPY)


# Several tiles of 16 x 16 with full, masked and skipped ones among them; one row; odd head dims.
# More shapes and every feature run forward and backward in test_triton_flash_attn_backward.py.
SHAPES = [(1, 3, 99, 2, 2, 16, 16), (1, 1, 64, 3, 1, 111, 111), (1, 17, 65, 5, 1, 1, 3)]
KWARGS: list[dict[str, Any]] = [{"causal": True, "softcap": 0.7}, {"window_size": (20, 3)}]


@pytest.mark.parametrize("kwargs", KWARGS, ids=str)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_many_tiles(sizes: tuple[int, ...], kwargs: dict[str, Any], poisoned_memory: None) -> None:
    args = op_args(Case("tiles", sizes=sizes, kwargs=kwargs, has_sink=True), torch.float32)
    with tiles_of(16, 16):
        assert_forward_close(body.flash_attn(*args), args, num_tiles=7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kwargs", [{}, {"causal": True}], ids=str)
def test_narrow_types(dtype: torch.dtype, kwargs: dict[str, Any]) -> None:
    args = op_args(Case("narrow", sizes=(1, 80, 112, 4, 2, 40, 64), kwargs=kwargs), dtype)
    with tiles_of(32, 32):
        out, lse = body.flash_attn(*args)
    assert out.dtype == dtype
    assert_forward_close((out, lse), args, num_tiles=4)
    # Probabilities and the result are rounded once each: sqrt(2) times the error of one rounding.
    wanted, _ = exact("flash_attn", args)
    once = float((wanted.to(dtype).double() - wanted).norm())
    assert float((out.double() - wanted).norm()) <= 1.5 * once


def test_rows_of_hugely_negative_scores() -> None:
    """exp(-lse) overflows and every exp(score) underflows: only the maximum saves the row."""
    args = list(op_args(Case("negative", sizes=(1, 20, 37, 2, 1, 8, 8)), torch.float32))
    args[0], args[1] = args[0].abs() * 30, args[1].abs() * -30
    with tiles_of(16, 16):
        out, lse = body.flash_attn(*args)
    assert (lse < -100).all()
    assert_forward_close((out, lse), tuple(args), num_tiles=3)


@pytest.mark.parametrize("p", [0.25, 1.0])
def test_dropout_mask_is_the_documented_one(p: float) -> None:
    """Equal scores and values e_j: the result is the mask itself, row by row."""
    batch, rows, keys, heads = 2, 21, 40, 3
    args = list(op_args(Case("mask", sizes=(batch, rows, keys, heads, 1, 4, keys)), torch.float32))
    args[0].zero_()
    args[2].copy_(torch.eye(keys)[None, :, None])
    args[6], args[-1] = torch.tensor([-(1 << 61) - 9, (1 << 31) + 5], device=DEVICE), p
    with tiles_of(16, 16):
        out, lse = body.flash_attn(*args)
    positions = (torch.arange(n, device=DEVICE) for n in (batch, heads, rows, keys))
    keep = dropout_keep(args[6], p, *positions)
    assert torch.equal(out.transpose(1, 2) != 0, keep)
    assert bool(keep.any()) == (p < 1)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(keys)))
    assert_forward_close((out, lse), tuple(args), num_tiles=3)


@pytest.mark.parametrize("kind", ["causal", "window", "bool", "minus_inf"])
def test_hidden_nan_reaches_nothing(kind: str) -> None:
    """Key 20 is bad: rows that see it are not finite, the others are as without it."""
    kwargs = {"causal": {"causal": True}, "window": {"window_size": (2, 2)}}.get(kind, {})
    case = Case("nan", sizes=(1, 40, 40, 2, 1, 8, 8), kwargs=kwargs)
    args = list(op_args(case, torch.float32))
    position = torch.arange(40, device=DEVICE)
    sees = {"causal": position >= 20, "window": (position - 20).abs() <= 2}.get(
        kind, position % 3 == 0
    )
    if kind in ("bool", "minus_inf"):
        mask = torch.ones(1, 1, 40, 40, dtype=torch.bool, device=DEVICE)
        mask[0, 0, ~sees, 20] = False
        args[3] = mask
        if kind == "minus_inf":
            args[3] = torch.zeros(mask.shape, device=DEVICE).masked_fill(~mask, -math.inf)
    with tiles_of(16, 16):
        clean, _ = body.flash_attn(*args)
        for spoiled, bad in ((1, math.nan), (2, math.nan), (2, math.inf)):
            own = list(args)
            own[spoiled] = args[spoiled].clone()
            own[spoiled][0, 20, 0, 3] = bad
            out, _ = body.flash_attn(*own)
            assert torch.equal(out[:, ~sees], clean[:, ~sees])
            assert not out[:, sees].isfinite().all(-1).any()


def test_bad_query_spoils_its_row_only() -> None:
    args = list(op_args(Case("query", sizes=(1, 40, 40, 1, 1, 8, 8)), torch.float32))
    with tiles_of(16, 16):
        clean, _ = body.flash_attn(*args)
        args[0][0, 7] = math.nan
        out, lse = body.flash_attn(*args)
    others = torch.arange(40, device=DEVICE) != 7
    assert torch.equal(out[:, others], clean[:, others])
    assert out[0, 7].isnan().all()
    assert lse[0, 0, 7].isnan()


def _strided(x: torch.Tensor, how: str) -> torch.Tensor:
    """The same values at other addresses."""
    if how == "heads_first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "last_dim_strided":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if how == "unaligned":
        flat = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
        flat[1:] = x.flatten()
        return flat[1:].view(x.shape)
    return x[:1, :, :1].expand(x.shape)


@pytest.mark.parametrize("how", ["heads_first", "last_dim_strided", "unaligned", "expanded"])
def test_strides(how: str) -> None:
    args = list(op_args(Case("strides", sizes=(2, 20, 19, 4, 2, 8, 6)), torch.float32))
    args[:3] = [_strided(t, how) for t in args[:3]]
    assert_forward_close(body.flash_attn(*args), tuple(args))


def test_offsets_beyond_32_bits() -> None:
    """Rows and batch entries that lie 2^31 elements apart; few pages of them are ever touched."""
    far = torch.empty(2**31 + 2**30 + 64, dtype=torch.float16, device=DEVICE)
    near = op_args(Case("far", sizes=(2, 2, 3, 1, 1, 16, 16)), torch.float16)
    q = far.as_strided((2, 2, 1, 16), (2**31, 2**29, 16, 1)).copy_(near[0])
    k = far[32:].as_strided((2, 3, 1, 16), (2**29 + 64, 2**30, 16, 1)).copy_(near[1])
    got = body.flash_attn(q, k, *near[2:])
    torch.testing.assert_close(got, body.flash_attn(*near), rtol=0, atol=0)


@pytest.mark.parametrize(
    "sizes",
    [(0, 3, 4, 2, 2, 5, 5), (2, 0, 4, 2, 2, 5, 5), (2, 3, 4, 0, 0, 5, 5), (2, 3, 4, 2, 2, 5, 0),
     (2, 3, 0, 2, 2, 5, 5), (2, 3, 4, 2, 2, 0, 5)],
    ids=["no_batch", "no_rows", "no_heads", "no_value_dim", "no_keys", "no_head_dim"],
)  # fmt: skip
def test_empty_sizes(sizes: tuple[int, ...], poisoned_memory: None) -> None:
    args = op_args(Case("empty", sizes=sizes, has_sink=True), torch.float32)
    got, wanted = body.flash_attn(*args), exact("flash_attn", args)
    for actual, expected in zip(got, wanted, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-6)
