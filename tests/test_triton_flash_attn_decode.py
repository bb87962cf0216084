"""Triton split-KV decode and KV caches: equal to the references, in the interpreter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from test_attention import Case
from torch import Tensor
from triton_attention import DEVICE, IGNORE_NUMPY, assert_forward_close, exact, op_args, worst

import mcp_kernels
from mcp_kernels.triton import flash_attn as body
from mcp_kernels.triton import flash_attn_config as config
from mcp_kernels.triton.flash_attn_config import Tile

pytestmark = pytest.mark.filterwarnings(IGNORE_NUMPY)


@pytest.fixture(params=[1, 3], ids=lambda n: f"splits{n}")
def splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tiles of 16 keys, so that a part has several."""
    monkeypatch.setattr(config, "decode_tile", lambda *size: Tile(16, 16, 4, 1))
    monkeypatch.setattr(config, "num_splits", lambda *size: request.param)
    return request.param


KWARGS: list[dict[str, Any]] = [
    {},
    {"causal": True, "softcap": 0.8},
    {"window_size": (70, 10), "causal_align": "top_left"},
    {"window_size": (20, 0), "softmax_scale": -0.4},
]


@pytest.mark.parametrize("kwargs", KWARGS, ids=str)
def test_plain_calls(kwargs: dict[str, Any], splits: int, poisoned_memory: None) -> None:
    """4 heads of 2 groups times 11 rows are 22 packed rows: two tiles, the second not full."""
    case = Case("decode", (2, 11, 131, 4, 2, 24, 20), kwargs, alibi=(4,), has_sink=True)
    args = op_args(case, torch.float32)
    problem = body.make_problem(*args)
    cache = body.full_cache(2, 131, args[0].device)
    assert_forward_close(body.run_decode(problem, cache), args, num_tiles=9 + splits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_types(dtype: torch.dtype) -> None:
    """The sizes of a generation step go to the decode kernel by themselves."""
    args = op_args(Case("narrow", sizes=(1, 1, 600, 4, 1, 16, 16)), dtype)
    assert body.is_decode(body.make_problem(*args))
    assert_forward_close(body.flash_attn(*args), args, num_tiles=10)


def test_more_rows_or_fewer_keys_are_no_decode() -> None:
    for sizes in ((1, 65, 600, 1, 1, 4, 4), (1, 1, 100, 1, 1, 4, 4)):
        args = op_args(Case("sizes", sizes=sizes), torch.float32)
        assert not body.is_decode(body.make_problem(*args))


def _draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE)


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


B, H, N, D, E = 3, 4, 2, 8, 6


def _cache_args(kind: str) -> list[Any]:
    """The op's arguments: 37 keys of capacity in a row, or in 10 pages of 4 an entry."""
    new, rows = 2, 3
    lengths = _ints(35, 0, 18)
    k_cache, v_cache = _draw(4, 37, N, D, seed=1), _draw(4, 37, N, E, seed=2)
    entries, starts, table, cos, sin = None, None, None, None, None
    if kind in ("rows", "rotary"):
        entries, starts = _ints(3, 0, 1), _ints(4, 0, 17)
    if kind == "pages":
        k_cache, v_cache = _draw(30, 4, N, D, seed=1), _draw(30, 4, N, E, seed=2)
        order = torch.randperm(30, generator=torch.Generator().manual_seed(4))
        table = order.view(3, 10).int().to(DEVICE)
        table[1, 1:] = -7  # never read
    if kind == "rotary":
        angles = _draw(40, 3, seed=7)
        cos, sin = angles.cos(), angles.sin()
    k, v = _draw(B, new, N, D, seed=3), _draw(B, new, N, E, seed=3)
    return [_draw(B, rows, H, D), k_cache, v_cache, k, v, cos, sin, lengths, entries, starts, table]


@pytest.mark.parametrize(
    "options",
    [(0.3, -1, 0, False, 0.0), (0.3, -1, -1, False, 0.9), (0.3, 6, 0, False, 0.0)],
    ids=str,
)
@pytest.mark.parametrize("kind", ["full", "rows", "pages", "rotary"])
def test_caches(kind: str, options: tuple[Any, ...], splits: int, poisoned_memory: None) -> None:
    rest = (_draw(B, H).abs(), _draw(H, seed=5), kind == "rotary", *options)
    args, own = _cache_args(kind), _cache_args(kind)
    with mcp_kernels.reference_only():
        torch.ops.mcp_kernels.flash_attn_kvcache(*args, *rest)
    got = body.flash_attn_kvcache(*own, *rest)
    assert torch.equal(own[1], args[1])  # the keys that were there, and the new ones
    assert torch.equal(own[2], args[2])
    wanted = exact("flash_attn_kvcache", (*_cache_args(kind), *rest))
    for actual, expected in zip(got, wanted, strict=True):
        # Scores of at most 10 + slope 3 * 37, from sums of 8 terms; values of at most 4.
        bound = torch.full_like(expected, (8 * 120 + 40) * 2.0**-24 * 4)
        assert torch.equal(actual.double().isinf(), expected.isinf())
        seen = expected.isfinite()
        assert ((actual.double() - expected).abs() <= bound)[seen].all(), worst(
            actual.double(), expected, bound
        )


def test_keys_past_the_length_may_be_nan(splits: int) -> None:
    args = _cache_args("full")
    args[3] = args[4] = None
    options = (None, None, True, 0.3, -1, -1, False, 0.0)
    clean, _ = body.flash_attn_kvcache(*args, *options)
    for b, length in enumerate(args[7].tolist()):
        args[1][b, length:] = math.nan
        args[2][b, length:] = math.nan
    out, lse = body.flash_attn_kvcache(*args, *options)
    assert torch.equal(out, clean)
    assert (out[1] == 0).all()
    assert (lse[1] == -math.inf).all()


@pytest.mark.parametrize("kind", ["length", "entry", "page"])
def test_what_lies_outside_the_cache_is_nan(kind: str, splits: int) -> None:
    """Nothing is read there, and only the entry concerned shows it."""
    args = _cache_args("pages" if kind == "page" else "rows")
    args[3] = args[4] = None
    if kind == "length":
        args[7][2] = 38
    elif kind == "entry":
        args[8][2] = 4
    else:
        args[10][2, 1] = 30
    out, lse = body.flash_attn_kvcache(*args, None, None, True, 0.3, -1, -1, False, 0.0)
    assert out[2].isnan().all()
    assert lse[2].isnan().all()
    assert out[:2].isfinite().all()


def test_combine_does_not_depend_on_the_number_of_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal scores: each part weighs what it holds, however the keys are cut."""
    q, k = torch.zeros(1, 1, 1, 4, device=DEVICE), torch.zeros(1, 100, 1, 4, device=DEVICE)
    v = torch.arange(100.0, device=DEVICE).view(1, 100, 1, 1)
    problem = body.make_problem(q, k, v, *[None] * 4, 0.5, -1, -1, False, 0.0, 0.0)
    cache = body.full_cache(1, 100, q.device)
    monkeypatch.setattr(config, "decode_tile", lambda *size: Tile(16, 16, 4, 1))
    for count in (1, 2, 7, 40):
        monkeypatch.setattr(config, "num_splits", lambda *size, count=count: count)
        out, lse = body.run_decode(problem, cache)
        torch.testing.assert_close(out.flatten(), torch.tensor([49.5], device=DEVICE))
        torch.testing.assert_close(lse.flatten(), torch.tensor([math.log(100)], device=DEVICE))
