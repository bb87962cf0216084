"""The semantics of attention, case by case, on every body: reference, instruction sets, Triton.

Case n of the table is ``test_case_<n>_...[<body>]``; 11 to 20 are in test_attention_cases_more.py.

     1 rows that see no key          2 empty sizes                  3 causal alignment
     4 windows                       5 softcap                      6 ALiBi
     7 groups of heads               8 value dim and scale          9 NaN behind a mask
    10 masks and biases
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_backends import (
    BACKENDS,
    assert_close,
    assert_same,
    call,
    device_of,
    draw,
    draw_one,
    dtype_of,
    forward,
    hold,
    running,
)
from torch import Tensor

from mcp_kernels import flash_attn_func, scaled_dot_product_attention

pytestmark = [
    pytest.mark.parametrize("on", BACKENDS),
    pytest.mark.filterwarnings(
        "ignore:(invalid value|overflow|divide by zero|All-NaN slice) enc:RuntimeWarning"
    ),
]


def test_case_01_rows_that_see_no_key(on: str) -> None:
    """out 0, lse -inf (with a sink: the sink), and nothing to any gradient."""
    q, k, v = draw(on, 1, 20, 3, 2, 1, 4, 4)
    got = hold(on, q, k, v, causal=True)
    assert (got.out[:, :17] == 0).all()
    assert (got.lse[:, :, :17] == -math.inf).all()
    assert (got.grads[0][:, :17] == 0).all()
    sink = draw_one(on, 2, seed=7)
    with_sink = hold(on, q, k, v, causal=True, sink=sink)
    assert (with_sink.out[:, :17] == 0).all()
    assert_close(with_sink.lse[0, :, 0], sink.detach().cpu().double(), 2)


@pytest.mark.parametrize(
    "sizes",
    [(2, 3, 0, 2, 1, 5, 5), (2, 0, 4, 2, 2, 5, 5), (0, 3, 4, 2, 2, 5, 5), (2, 3, 4, 0, 0, 5, 5),
     (2, 3, 4, 2, 2, 0, 3), (2, 3, 4, 2, 2, 5, 0)],
    ids=["no_keys", "no_rows", "no_batch", "no_heads", "no_head_dim", "no_value_dim"],
)  # fmt: skip
def test_case_02_empty_sizes(on: str, sizes: tuple[int, ...]) -> None:
    q, k, v = draw(on, *sizes)
    scale = None if sizes[5] else 1.0  # 1 / sqrt(0) is the oracle's, not the call's
    got = hold(on, q, k, v, softmax_scale=scale)
    assert got.out.shape == (sizes[0], sizes[1], sizes[3], sizes[6])
    for grad, leaf in zip(got.grads, (q, k, v), strict=True):
        assert grad.shape == leaf.shape
        assert grad.isfinite().all()


def test_case_03_causal_alignment(on: str) -> None:
    """Bottom-right: the last row sees the last key. Top-left, and ``sdpa``: row 0 sees key 0."""
    more_keys, more_rows = draw(on, 1, 5, 20, 1, 1, 4, 4), draw(on, 1, 20, 5, 1, 1, 4, 4)
    for q, k, v in (more_keys, more_rows):
        hold(on, q, k, v, causal=True)
        top_left = hold(on, q, k, v, causal=True, causal_align="top_left")
        with running(on):
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        assert torch.equal(out.transpose(1, 2).cpu(), top_left.out)
    q, k, v = more_keys
    one, plain = (forward(on, q[:, :1], k, v, causal=causal) for causal in (True, False))
    assert_close(one, plain.double(), 2)


@pytest.mark.parametrize("window", [(3, 2), (0, 0), (18, -1), (-1, 1)], ids=str)
def test_case_04_windows_are_inclusive(on: str, window: tuple[int, int]) -> None:
    hold(on, *draw(on, 1, 18, 20, 1, 1, 4, 4), window_size=window)
    if window == (0, 0):
        q, k, v = draw(on, 1, 20, 20, 1, 1, 4, 4)
        # p v / p, where p is 1 up to the rounding of its own maximum: three roundings of v.
        own = forward(on, q, k, v, window_size=window)
        torch.testing.assert_close(own.double(), v.detach().cpu().double(), rtol=2**-22, atol=0)
        hold(on, q[:, :18], k, v, window_size=(2, 5), causal=True, causal_align="top_left")
        wide, none = (forward(on, q, k, v, window_size=w) for w in ((20, 10**9), (-1, -1)))
        assert_close(wide, none.double(), 2)
        with running(on), pytest.raises(ValueError, match="window_size must be >= 0, or -1"):
            flash_attn_func(q, k, v, window_size=(-2, 0))


def test_case_05_softcap_comes_before_bias_and_alibi(on: str) -> None:
    q, k, v = draw(on, 1, 5, 20, 2, 1, 4, 4)
    extras = {"bias": draw_one(on, 1, 2, 5, 20), "alibi_slopes": torch.tensor([0.3, 0.1])}
    extras["alibi_slopes"] = extras["alibi_slopes"].to(q.device)
    hold(on, q, k, v, softcap=0.7, **extras)
    assert torch.equal(forward(on, q, k, v, softcap=0.0), forward(on, q, k, v))
    with running(on):
        assert flash_attn_func(q, k, v, 0.5, softcap=0.7).isfinite().all()
        with pytest.raises(ValueError, match="softcap must be >= 0"):
            flash_attn_func(q, k, v, softcap=-1.0)


@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=str)
def test_case_06_alibi(on: str, shape: tuple[int, ...]) -> None:
    q, k, v = draw(on, 2, 5, 18, 4, 2, 4, 4)
    slopes = torch.rand(shape, generator=torch.Generator().manual_seed(1)).to(q.device)
    hold(on, q, k, v, alibi_slopes=slopes, causal=len(shape) == 2)
    with running(on), pytest.raises(ValueError, match="must not require grad"):
        flash_attn_func(q, k, v, alibi_slopes=slopes.clone().requires_grad_())


def test_case_07_a_group_of_heads_shares_its_neighbouring_kv_head(on: str) -> None:
    q, k, v = draw(on, 1, 3, 10, 6, 2, 4, 4)
    got = hold(on, q, k, v)
    wide_k, wide_v = (t.repeat_interleave(3, dim=2) for t in (k, v))
    assert_close(forward(on, q, wide_k, wide_v), got.out.double(), 2)
    with (
        running(on),
        pytest.raises(ValueError, match="multiple of KV heads, got 5 query heads and 2 KV"),
    ):
        flash_attn_func(q[:, :, :5], k, v)


def test_case_07_a_group_is_summed_before_it_is_rounded(on: str) -> None:
    """One key and 5 heads, which give dv = 256, 1, 1, 1, 1: a bfloat16 sum stays at 256."""
    dtype = torch.bfloat16
    q = draw_one(on, 1, 1, 5, 4, dtype=dtype)
    k, v = (draw_one(on, 1, 1, 1, 4, seed=s, dtype=dtype) for s in (1, 2))
    weights = torch.tensor([256.0, 1.0, 1.0, 1.0, 1.0], device=q.device)[:, None]
    with running(on):
        (dv,) = torch.autograd.grad((flash_attn_func(q, k, v) * weights).sum(), v)
    assert (dv == 260).all()


def test_case_08_value_dim_and_scale(on: str) -> None:
    """The scale is that of the head dim as given, not padded; it may be 0 or negative."""
    q, k, v = draw(on, 1, 4, 19, 1, 1, 5, 9)
    hold(on, q, k, v)
    hold(on, q, k, v, softmax_scale=-0.8)
    mean = hold(on, q, k, v, softmax_scale=0.0)
    wanted = v.detach().cpu().double().mean(1, keepdim=True).expand_as(mean.out)
    assert_close(mean.out, wanted, 2)


# Who sees key 20 of 40, and how a call says so.
SEEN_BY: dict[str, tuple[list[int], dict[str, Any]]] = {
    "causal": (list(range(20, 40)), {"causal": True}),
    "window": (list(range(18, 23)), {"window_size": (2, 2)}),
    "mask": ([1, 20, 39], {}),
    "minus_inf": ([1, 20, 39], {}),
}


@pytest.mark.parametrize("kind", SEEN_BY)
def test_case_09_nan_reaches_exactly_the_rows_that_see_it(on: str, kind: str) -> None:
    """In k, and in v: every row that sees the key is NaN, every other as without it, bit for bit.

    So are the gradients of q; those of k and v, of keys that no such row sees.
    """
    q, k, v = draw(on, 1, 40, 40, 1, 1, 8, 8)
    seen, kwargs = SEEN_BY[kind]
    blind = [i for i in range(40) if i not in seen]
    if kind in ("mask", "minus_inf"):
        mask = torch.ones(40, 40, dtype=torch.bool)
        mask[blind, 20] = False
        mask[seen, :10] = False  # keys that no row with a NaN sees
        zeros = torch.zeros(40, 40, dtype=dtype_of(on))
        bias = mask if kind == "mask" else zeros.masked_fill(~mask, -math.inf)
        kwargs = {"bias": bias.to(q.device)}
    clean = call(on, q, k, v, **kwargs)
    for spoiled in (1, 2):
        inputs = [q, k, v]
        inputs[spoiled] = inputs[spoiled].detach().clone()
        inputs[spoiled][0, 20] = math.nan
        inputs[spoiled].requires_grad_()
        got = call(on, *inputs, **kwargs)
        assert got.out[:, seen].isnan().all()
        assert_same(on, got.out[:, blind], clean.out[:, blind])
        assert got.grads[0][:, seen].isnan().all()
        assert_same(on, got.grads[0][:, blind], clean.grads[0][:, blind])
        if spoiled == 1:
            assert got.lse[:, :, seen].isnan().all()
            assert_same(on, got.lse[:, :, blind], clean.lse[:, :, blind])
        far = {"window": [*range(16), *range(25, 40)], "causal": []}.get(kind, list(range(10)))
        for grad, wanted in zip(got.grads[1:], clean.grads[1:], strict=True):
            assert_close(grad[:, far], wanted[:, far].double(), 4)


BIASES = {
    "full": (2, 2, 3, 20),
    "row": (20,),
    "head": (2, 1, 20),
    "batch": (2, 1, 3, 1),
    "one": (1, 1, 1, 1),
}


@pytest.mark.parametrize("shape", BIASES.values(), ids=BIASES)
def test_case_10_masks_and_biases(on: str, shape: tuple[int, ...]) -> None:
    """True attends, floats are added after the scale and have a gradient; causal applies, too."""
    q, k, v = draw(on, 2, 3, 20, 2, 1, 4, 4)
    bias = draw_one(on, *shape, seed=8)
    hold(on, q, k, v, bias=bias, causal=True)
    mask = bias.detach() > -0.5
    hold(on, q, k, v, bias=mask, causal=True)


def test_case_10_lowest_finite_bias_is_finite(on: str) -> None:
    """A row of finfo.min is uniform; one of -inf sees no key."""
    q, k, v = (t.detach() for t in draw(on, 1, 2, 18, 1, 1, 4, 3))
    bias = torch.full((2, 18), torch.finfo(dtype_of(on)).min, dtype=dtype_of(on))
    bias[1] = -math.inf
    with running(on):
        out, lse = flash_attn_func(q, k, v, bias=bias.to(device_of(on)), return_lse=True)
    assert_close(out[:, 0].cpu(), v.double().mean(1).cpu(), 2)
    assert (out[:, 1] == 0).all()
    assert (lse[..., 1] == -math.inf).all()


def test_every_body_of_this_machine_is_here(on: str) -> None:
    """The list of bodies is not empty, and each is the one that runs."""
    q: Tensor = draw(on, 1, 1, 1, 1, 1, 1, 1)[0]
    with running(on):
        out = flash_attn_func(q, q, q)
    assert_close(out.detach().cpu(), q.detach().double().cpu(), 1)
    assert {"reference", "triton"} <= set(BACKENDS)
