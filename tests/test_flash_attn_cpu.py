"""The compiled attention bodies of every instruction set against float64 on the same inputs.

Forward, elementwise: the bound of test_attention_precision.py. Gradients, as a norm: each is a sum
of products of float32 results, rounded once at the end, so
    |got - exact| <= 1.5 |round(exact) - exact| + 300 u |magnitude|
with u float32's roundoff and magnitude the same sum with every term positive. For the terms of
dS = P (dP - delta) that is P (|dP| + |delta|), since the difference may cancel.

Products of bfloat16 round P and dS once more, each by its own: that many roundings of the magnitude
are then allowed too. test_flash_attn_bf16.py says how little of them is left in a norm.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from naive_attention import naive_attention
from test_attention import CASES, Case, make, weigh
from torch import Tensor

from mcp_kernels import flash_attn_func, flash_attn_varlen_func, reference_only
from mcp_kernels.testing import assert_same_bits

_C: Any = None
ISAS: list[str] = []
if importlib.util.find_spec("mcp_kernels._C") is not None:
    _C = importlib.import_module("mcp_kernels._C")
    ISAS = list(_C.cpu_isas())

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
U = 2.0**-24

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(not ISAS, reason="a pure-Python install has no compiled body"),
]


@contextmanager
def running_on(isa: str) -> Iterator[None]:
    before = _C.cpu_isa()
    _C.set_cpu_isa(isa)
    try:
        yield
    finally:
        _C.set_cpu_isa(before)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with running_on(request.param):
        yield request.param


@dataclass(frozen=True)
class Exact:
    """Results in float64, and what bounds their error."""

    out: Tensor
    lse: Tensor
    grads: tuple[Tensor, Tensor, Tensor]
    out_magnitude: Tensor
    grad_magnitudes: tuple[Tensor, Tensor, Tensor]
    score_error: float


def exact_attention(
    leaves: tuple[Tensor, ...],
    dout: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
) -> Exact:
    """The whole score matrix in float64, gradients by autograd; every row must see a key."""
    q, k, v = (t.detach().double().transpose(1, 2).requires_grad_() for t in leaves)
    group, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    rows, keys = q.shape[2], k.shape[2]
    wide_k, wide_v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    s = q @ wide_k.mT * scale
    distance = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)
    left, right = window
    visible = (distance >= -left if left >= 0 else distance == distance) & (
        distance <= (0 if causal else right) if causal or right >= 0 else distance == distance
    )
    s = s.masked_fill(~visible, -math.inf)
    p = s.softmax(-1)
    out = (p @ wide_v).transpose(1, 2)
    grads = torch.autograd.grad(out, (q, k, v), dout.double())
    with torch.no_grad():
        d = dout.double().transpose(1, 2).abs()
        dp = d @ wide_v.abs().mT
        ds = p * (dp + (p * dp).sum(-1, keepdim=True)) * scale
        by_group = (q.shape[0], k.shape[1], group, keys, -1)
        magnitudes = (
            ds @ wide_k.abs(),
            (ds.mT @ q.abs()).view(by_group).sum(2),
            (p.mT @ d).view(by_group).sum(2),
        )
        dq, dk, dv = (t.transpose(1, 2) for t in grads)
        mq, mk, mv = (t.transpose(1, 2) for t in magnitudes)
        products = q.abs() @ wide_k.abs().mT * scale
        error = q.shape[3] ** 0.5 * U * float(products.max())
        magnitude = (p @ wide_v.abs()).transpose(1, 2)
    return Exact(
        out.detach(), s.detach().logsumexp(-1), (dq, dk, dv), magnitude, (mq, mk, mv), error
    )


def draw(*sizes: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dout for sizes B, Sq, Sk, H, N, D, E."""
    batch, rows, keys, heads, kv_heads, dim, value_dim = sizes
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (batch, rows, heads, dim),
        (batch, keys, kv_heads, dim),
        (batch, keys, kv_heads, value_dim),
        (batch, rows, heads, value_dim),
    )
    q, k, v, dout = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    return q, k, v, dout


def run(leaves: tuple[Tensor, ...], dout: Tensor, **kwargs: Any) -> list[Tensor]:
    q, k, v = (t.detach().requires_grad_() for t in leaves)
    out, lse = flash_attn_func(q, k, v, return_lse=True, **kwargs)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def assert_within_bounds(got: list[Tensor], exact: Exact, keys: int) -> None:
    out, lse, *grads = got
    is_wide = out.dtype == torch.float64
    unit = 2.0**-53 if is_wide else U
    u_out = torch.finfo(out.dtype).eps / 2
    score_error = exact.score_error * unit / U
    # The products of bfloat16 bodies have P and dS rounded.
    is_narrow = out.dtype == torch.bfloat16 and _C.cpu_isa() == "avx512_bf16"
    rounded = 1.01 * u_out if is_narrow else 0.0
    of_magnitude = 2 * score_error + (keys**0.5 + 8) * unit + rounded
    bound = 1.01 * u_out * exact.out.abs() + of_magnitude * exact.out_magnitude
    assert ((out.double() - exact.out).abs() <= bound).all()
    assert ((lse - exact.lse).abs() <= score_error + 8 * unit * (1 + exact.lse.abs())).all()
    for name, grad, wanted, magnitude in zip(
        "qkv", grads, exact.grads, exact.grad_magnitudes, strict=True
    ):
        once = float((wanted.to(grad.dtype).double() - wanted).norm())
        error = float((grad.double() - wanted).norm())
        allowed = 1.5 * once + (300 * unit + rounded) * float(magnitude.norm())
        assert error <= allowed, (f"d{name}", error, allowed)


# D around registers and panels; Sq and Sk around tiles (48 rows, 128 keys), splits (1024 keys) and
# the parts of backward; GQA with groups that do not divide a tile of rows.
WIDTHS = [1, 16, 40, 59, 64, 111, 128]
LENGTHS = [(1, 1), (1, 239), (3, 799), (49, 129), (100, 100)]
GROUPS = [(65, 5), (16, 4), (5, 1)]
ALL_SHAPES = [
    *((1, 49, 131, 2, 1, dim, dim) for dim in WIDTHS),
    *((2, rows, keys, 2, 2, 24, 40) for rows, keys in LENGTHS),
    *((1, 7, 50, heads, kv_heads, 8, 8) for heads, kv_heads in GROUPS),
]
# More than one part of dq, more than one split of the keys: on the best instruction set only.
BEST_SHAPES = [
    *((1, 70, 90, 1, 1, dim, dim) for dim in (32, 80, 96, 192, 256, 512)),
    (1, 1024, 1023, 1, 1, 64, 64),
    (1, 130, 1100, 2, 1, 16, 16),
    (2, 2, 3000, 8, 2, 32, 32),
    (1, 1, 2100, 6, 6, 16, 16),  # heads that are gone through four at a time, and what is left
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("sizes", ALL_SHAPES, ids=str)
def test_every_instruction_set(
    isa: str, dtype: torch.dtype, causal: bool, sizes: tuple[int, ...]
) -> None:
    *leaves, dout = draw(*sizes, dtype=dtype)
    exact = exact_attention(tuple(leaves), dout, causal=causal)
    assert_within_bounds(run(tuple(leaves), dout, causal=causal), exact, sizes[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "kwargs", [{}, {"window": (100, 30)}, {"window": (64, -1)}, {"window": (-1, 5)}], ids=str
)
@pytest.mark.parametrize("sizes", BEST_SHAPES, ids=str)
def test_windows_splits_and_parts(
    dtype: torch.dtype, kwargs: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    *leaves, dout = draw(*sizes, dtype=dtype)
    if sizes[1] > sizes[2] and kwargs.get("window", (-1, -1))[1] >= 0:
        leaves[0], dout = leaves[0][:, -sizes[2] :], dout[:, -sizes[2] :]
    exact = exact_attention(tuple(leaves), dout, **kwargs)
    got = run(tuple(leaves), dout, window_size=kwargs.get("window", (-1, -1)))
    assert_within_bounds(got, exact, sizes[2])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_feature(isa: str, case: Case) -> None:
    leaves, kwargs = make(case)
    q, k, v = leaves[:3]
    out, lse = flash_attn_func(q, k, v, **kwargs, return_lse=True)
    expected_out, expected_lse = naive_attention(q, k, v, **kwargs)
    torch.testing.assert_close(out, expected_out, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-13)
    got = torch.autograd.grad(weigh(out, lse), leaves)
    expected = torch.autograd.grad(weigh(expected_out, expected_lse), leaves)
    for actual, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_feature_in_float32(isa: str, case: Case) -> None:
    leaves, kwargs = make(case, torch.float32)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    wide_kwargs: dict[str, Any] = {
        name: wide[next(i for i, t in enumerate(leaves) if t is value)]
        if any(value is t for t in leaves)
        else value
        for name, value in kwargs.items()
    }
    q, k, v = leaves[:3]
    out, lse = flash_attn_func(q, k, v, **kwargs, return_lse=True)
    q, k, v = wide[:3]
    expected_out, expected_lse = naive_attention(q, k, v, **wide_kwargs)
    # At most 13 keys, scores and values below 10: a few dozen roundings of numbers of that size.
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=100 * U)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=100 * U)
    got = torch.autograd.grad(weigh(out, lse), leaves)
    expected = torch.autograd.grad(weigh(expected_out, expected_lse), wide)
    for actual, wanted in zip(got, expected, strict=True):
        size = max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=300 * U * size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_drops_what_the_reference_drops(isa: str, dtype: torch.dtype) -> None:
    *leaves, dout = draw(2, 70, 150, 4, 2, 16, 16, dtype=dtype)
    results = []
    for mode in (reference_only, lambda: running_on(isa)):
        torch.manual_seed(3)
        with mode():
            results.append(run(tuple(leaves), dout, dropout_p=0.3, causal=True))
    for got, wanted in zip(results[1], results[0], strict=True):
        # A wrong bit moves an element by its whole size; the two differ by their roundings only,
        # products of bfloat16 also by those of P, at most 1 / 0.7 and times a v of 3.
        eps = torch.finfo(got.dtype).eps
        atol = 200 * U + (eps / 2 if isa == "avx512_bf16" else eps / 16)
        torch.testing.assert_close(got, wanted, rtol=2 * eps, atol=atol)
    *leaves, dout = draw(1, 3, 5, 1, 1, 4, 4, dtype=dtype)
    for tensor in run(tuple(leaves), dout, dropout_p=1.0)[::2]:
        assert (tensor == 0).all()


THREAD_CASES = [
    ((3, 130, 200, 4, 2, 16, 16), {"causal": True}),
    ((1, 600, 1200, 1, 1, 16, 16), {"window_size": (300, 20)}),
    ((1, 1, 5000, 8, 2, 32, 32), {}),
    # More than 4 blocks of 48 rows a task on one thread, 4 on more; rows of k near and far.
    ((1, 500, 500, 4, 1, 16, 16), {"causal": True, "window_size": (200, 0)}),
    ((1, 250, 300, 10, 5, 128, 16), {"causal": True}),
    ((2, 100, 100, 2, 2, 16, 16), {"bias": (1, 2, 1, 100)}),
    ((2, 100, 100, 2, 2, 16, 16), {"sink": (2,)}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("sizes", "kwargs"), THREAD_CASES, ids=str)
def test_threads_do_not_change_a_bit(
    dtype: torch.dtype, sizes: tuple[int, ...], kwargs: dict[str, Any]
) -> None:
    *leaves, dout = draw(*sizes, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    kwargs = dict(kwargs)
    extra = [name for name in ("bias", "sink") if name in kwargs]
    for name in extra:
        kwargs[name] = torch.randn(kwargs[name], generator=generator).requires_grad_()

    def results() -> list[Tensor]:
        q, k, v = (t.detach().requires_grad_() for t in leaves)
        out, lse = flash_attn_func(q, k, v, return_lse=True, **kwargs)
        asked = [q, k, v, *(kwargs[name] for name in extra)]
        return [out.detach(), lse.detach(), *torch.autograd.grad(out, asked, dout)]

    expected = results()
    for count in (2, 3):
        with threads(count):
            for got, wanted in zip(results(), expected, strict=True):
                assert_same_bits(got, wanted)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("spoiled", ["q", "k", "v", "dout"])
def test_what_is_hidden_reaches_nothing(isa: str, bad: float, spoiled: str) -> None:
    """Position 60 of 100 is bad, causal: what does not see it is bit for bit as without it."""
    *leaves, dout = draw(1, 100, 100, 4, 2, 16, 24, dtype=torch.float32)
    clean = run(tuple(leaves), dout, causal=True)
    inputs: dict[str, Tensor] = dict(zip(("q", "k", "v", "dout"), (*leaves, dout), strict=True))
    inputs[spoiled] = inputs[spoiled].clone()
    inputs[spoiled][0, 60] = bad
    got = run((inputs["q"], inputs["k"], inputs["v"]), inputs["dout"], causal=True)
    before, after = slice(0, 60), slice(61, 100)
    out, _, dq, dk, dv = got
    torch.testing.assert_close(out[:, before], clean[0][:, before], rtol=0, atol=0)
    torch.testing.assert_close(dq[:, before], clean[2][:, before], rtol=0, atol=4 * U)
    if spoiled in ("q", "dout"):  # one bad row: it sees the keys up to its own
        torch.testing.assert_close(dq[:, after], clean[2][:, after], rtol=0, atol=4 * U)
        for grad, wanted in ((dk, clean[3]), (dv, clean[4])):
            size = float(wanted.abs().max())
            torch.testing.assert_close(grad[:, after], wanted[:, after], rtol=0, atol=8 * U * size)


def test_strides_and_alignment(isa: str) -> None:
    *leaves, dout = draw(2, 60, 140, 4, 4, 24, 24, dtype=torch.bfloat16)
    expected = run(tuple(leaves), dout, causal=True)
    spread = []
    for tensor in (*leaves, dout):
        base = torch.full((2, 4, 3 * tensor.shape[1], 49), math.nan, dtype=tensor.dtype)
        view = base[:, :, 1::3, 1::2].transpose(1, 2)
        view.copy_(tensor)
        spread.append(view)
    got = run(tuple(spread[:3]), spread[3], causal=True)
    for actual, wanted in zip(got, expected, strict=True):
        assert_same_bits(actual, wanted)
    expanded = torch.ones((), dtype=torch.bfloat16).expand(2, 60, 4, 24)
    for actual, wanted in zip(
        run(tuple(leaves), expanded), run(tuple(leaves), expanded.contiguous()), strict=True
    ):
        assert_same_bits(actual, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sequences_end_to_end_are_calls_of_their_own(isa: str, dtype: torch.dtype) -> None:
    """Bit for bit, with empty sequences and with rows after the last one, which are 0."""
    rows, keys = [0, 50, 0, 130, 7, 3], [9, 60, 0, 90, 0, 200]
    q_ends, k_ends = (torch.tensor([0, *x]).cumsum(0) for x in (rows, keys))
    *leaves, dout = draw(1, sum(rows) + 4, sum(keys) + 5, 4, 2, 24, 16, dtype=dtype)
    q, k, v = (t[0].requires_grad_() for t in leaves)
    kwargs: dict[str, Any] = {"causal": True, "window_size": (70, -1)}
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, q_ends, k_ends, max(rows), max(keys), return_attn_probs=True, **kwargs
    )
    grads = torch.autograd.grad(out, (q, k, v), dout[0])
    for b in range(len(rows)):
        own_rows = slice(int(q_ends[b]), int(q_ends[b + 1]))
        own_keys = slice(int(k_ends[b]), int(k_ends[b + 1]))
        own = run((q[None, own_rows], k[None, own_keys], v[None, own_keys]), dout[:, own_rows],
                  **kwargs)  # fmt: skip
        got = [
            out[own_rows],
            lse[:, own_rows],
            grads[0][own_rows],
            *(g[own_keys] for g in grads[1:]),
        ]
        for actual, wanted in zip(got, own, strict=True):
            assert_same_bits(actual.detach(), wanted[0])
    for tensor, used in ((out, rows), (grads[0], rows), (grads[1], keys), (grads[2], keys)):
        assert (tensor[sum(used) :] == 0).all()
    assert (lse[:, sum(rows) :] == -math.inf).all()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"k": torch.zeros(1, 5, 1, 3)}, "flash_attn: k must be 4 in dimension 3, got 3"),
        ({"v": torch.zeros(1, 4, 1, 4)}, "flash_attn: v must be 5 in dimension 1, got 4"),
        ({"q": torch.zeros(1, 5, 3, 4), "k": torch.zeros(1, 5, 2, 4)}, "must be 2 in dimension 2"),
        ({"v": torch.zeros(1, 5, 1, 4).half()}, "flash_attn: v must have dtype code"),
        ({"sink": torch.zeros(2)}, "flash_attn: sink must have 1 elements, got 2"),
        ({"bias": torch.zeros(1, 1, 2, 5)}, "flash_attn: bias must be 1 or 5 in dimension 2"),
    ],
)  # fmt: skip
def test_the_op_itself_refuses(change: dict[str, Tensor], match: str) -> None:
    """What torch.ops callers get: no body ever leaves its buffers."""
    given: dict[str, Any] = {name: torch.zeros(1, 5, 1, 4) for name in "qkv"}
    given |= dict.fromkeys(("bias", "alibi_slopes", "sink", "rng")) | change
    with pytest.raises(RuntimeError, match=match):
        torch.ops.mcp_kernels.flash_attn(**given, softmax_scale=1.0, window_left=-1,
                                         window_right=-1, top_left=False, softcap=0.0,
                                         dropout_p=0.0)  # fmt: skip
