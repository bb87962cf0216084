"""Cases 11 to 20 of the semantics of attention, on every body; 1 to 10: test_attention_cases.py.

11 strides                      12 offsets beyond 32 bits      13 sequences end to end
14 KV cache                     15 large logits                16 dropout
17 sink                         18 gradient of lse             19 the same bits again
20 errors, needed gradients, inference
"""

from __future__ import annotations

import math
from itertools import pairwise

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
    exact,
    forward,
    hold,
    running,
)
from naive_attention import naive_attention
from torch import Tensor

from mcp_kernels import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from mcp_kernels.ops.attention_mask import dropout_keep

pytestmark = [
    pytest.mark.parametrize("on", BACKENDS),
    pytest.mark.filterwarnings(
        "ignore:(invalid value|overflow|divide by zero|All-NaN slice) enc:RuntimeWarning"
    ),
]


def _respread(x: Tensor, how: str) -> Tensor:
    """The same values at other addresses; with "expanded", those of head 0."""
    if how == "heads_first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "every_second":
        wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), math.nan)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    if how == "unaligned":
        flat = x.new_full((x.numel() + 1,), math.nan)
        flat[1:] = x.flatten()
        return flat[1:].view(x.shape)
    return x[:, :, :1].expand(x.shape)


@pytest.mark.parametrize("how", ["heads_first", "every_second", "unaligned", "expanded"])
def test_case_11_strides(on: str, how: str) -> None:
    q, k, v = (_respread(t.detach(), how).requires_grad_() for t in draw(on, 1, 5, 18, 2, 2, 6, 3))
    hold(on, q, k, v, causal=True)
    if how != "expanded":
        return
    with running(on):  # sum() sends a gradient of stride 0
        out = flash_attn_func(q, k, v)
        expanded = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
        full = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all(torch.equal(a, b) for a, b in zip(expanded, full, strict=True))


def test_case_12_offsets_beyond_32_bits(on: str) -> None:
    """Rows and batch entries that lie 2^31 elements apart; few pages of them are ever touched."""
    device = device_of(on)
    far = torch.empty(2**31 + 2**30 + 64, dtype=torch.bfloat16, device=device)
    q, k = (draw_one(on, 2, n, 1, 16, seed=n, dtype=far.dtype).detach() for n in (2, 3))
    far_q = far.as_strided(q.shape, (2**31, 2**29, 16, 1)).copy_(q)
    far_k = far[32:].as_strided(k.shape, (2**29 + 64, 2**30, 16, 1)).copy_(k)
    with running(on):
        out, near = flash_attn_func(far_q, far_k, far_k), flash_attn_func(q, k, k)
    assert torch.equal(out, near)


def test_case_13_sequences_end_to_end(on: str) -> None:
    """Each as if alone, empty ones and slack included, with ends of either integer type."""
    rows, keys, slack = [5, 0, 3, 2], [7, 4, 0, 18], 3
    q_ends, k_ends = (torch.tensor([0, *n]).cumsum(0) for n in (rows, keys))
    q, k, v = (t[0] for t in draw(on, 1, sum(rows) + slack, sum(keys) + slack, 2, 1, 4, 4))
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    q, k, v = leaves
    with running(on):
        out, lse = flash_attn_varlen_func(
            q, k, v, q_ends.int().to(q.device), k_ends.to(q.device), 5, 18, causal=True,
            return_lse=True,
        )  # fmt: skip
        grads = torch.autograd.grad(out.sum(), leaves)
    for b, (own_rows, own_keys) in enumerate(
        zip(pairwise(q_ends.tolist()), pairwise(k_ends.tolist()), strict=True)
    ):
        parts = [slice(*own_rows), slice(*own_keys), slice(*own_keys)]
        own = [t.detach()[None, part].cpu().double() for t, part in zip(leaves, parts, strict=True)]
        own = [t.requires_grad_() for t in own]
        wanted, wanted_lse = naive_attention(own[0], own[1], own[2], causal=True)
        assert_close(out[parts[0]].detach().cpu(), wanted[0].detach(), 2)
        assert_close(lse[:, parts[0]].detach().cpu(), wanted_lse[0].detach(), 2)
        if rows[b] and keys[b]:
            for grad, part, by_row in zip(
                grads, parts, torch.autograd.grad(wanted.sum(), own), strict=True
            ):
                assert_close(grad[part].cpu(), by_row[0], 4)
    for tensor, end in ((out, 10), (grads[0], 10), (grads[1], 29), (grads[2], 29)):
        assert (tensor[end:] == 0).all()
    with running(on), torch.no_grad():
        nothing = torch.zeros(1, dtype=torch.int32, device=q.device)
        assert (flash_attn_varlen_func(q, k, v, nothing, nothing, 0, 0) == 0).all()


@pytest.mark.parametrize("page_size", [0, 3], ids=["rows", "pages"])
def test_case_14_kv_cache(on: str, page_size: int) -> None:
    """Lengths are those before the append; what lies behind the end is never read."""
    lengths, new, capacity = [0, 15], 2, 18
    q, k, v = (t.detach() for t in draw(on, 2, 2, new, 2, 1, 4, 4))
    caches = [draw_one(on, 2, capacity, 1, 4, seed=s).detach() for s in (5, 6)]
    keys = [
        [torch.cat([cache[b, :n], appended[b]]) for b, n in enumerate(lengths)]
        for cache, appended in zip(caches, (k, v), strict=True)
    ]
    for cache in caches:
        for b, n in enumerate(lengths):
            cache[b, n:] = math.nan
    table = None
    if page_size:
        pages = capacity // page_size
        order = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(3))
        table = order.view(2, pages).int()
        caches = [c.view(2 * pages, page_size, 1, 4)[order.argsort()].contiguous() for c in caches]
        table[0, 1:], table[1, 6:] = -1, 1 << 20
        table = table.to(q.device)
    ends = torch.tensor(lengths, dtype=torch.int32, device=q.device)
    with running(on):
        out, lse = flash_attn_with_kvcache(
            q, *caches, k, v, cache_seqlens=ends, causal=True, block_table=table,
            return_softmax_lse=True,
        )  # fmt: skip
    for b in range(2):
        own = exact(q[b : b + 1], keys[0][b][None], keys[1][b][None], causal=True)
        assert_close(out[b : b + 1].cpu(), own.out, 2)
        assert_close(lse[b : b + 1].cpu(), own.lse, 2)
    if table is None:
        assert torch.equal(caches[0][1, 15:17], k[1])
        with running(on):
            none, dead = flash_attn_with_kvcache(
                q, *caches, cache_seqlens=torch.zeros_like(ends), return_softmax_lse=True
            )
        assert (none == 0).all()
        assert (dead == -math.inf).all()
        with running(on), pytest.raises(RuntimeError, match="has no backward"):
            flash_attn_with_kvcache(q.requires_grad_(), *caches, cache_seqlens=ends)


@pytest.mark.parametrize("shift", [1e4, -1e4, -200.0])
def test_case_15_large_logits(on: str, shift: float) -> None:
    """No overflow, and the result of the shifted-back problem; backward, too, where lse < -100.

    A score of 1e4 is a multiple of 2^-10 in float32: exponents, and what they give, are off by
    half of that.
    """
    q, k, v = draw(on, 1, 3, 18, 1, 1, 4, 4)
    bias = torch.full((1,), shift, device=q.device)
    got, plain = call(on, q, k, v, bias=bias), exact(q, k, v)
    unit = max(2.0**-10 if abs(shift) > 1e3 else 2.0**-16, torch.finfo(got.out.dtype).eps)
    for actual, wanted in zip((got.out, *got.grads), (plain.out, *plain.grads), strict=True):
        size = max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=8 * unit * size)
    torch.testing.assert_close(got.lse.double() - shift, plain.lse, rtol=0, atol=2 * unit)


def test_case_15_infinite_query_spoils_its_row_only(on: str) -> None:
    q, k, v = draw(on, 1, 20, 18, 1, 1, 4, 4)
    clean, bad = forward(on, q, k, v), q.detach().clone()
    bad[0, 7] = math.inf
    got = forward(on, bad, k, v)
    others = [i for i in range(20) if i != 7]
    assert not got[0, 7].isfinite().any()
    assert_same(on, got[:, others], clean[:, others])


def test_case_16_dropout(on: str) -> None:
    """The mask is a function of (seed, offset; b, h, i, j); lse is as without it."""
    q, k, v = draw(on, 2, 3, 18, 2, 1, 4, 4)
    rng, options = torch.tensor([(1 << 40) + 5, 3], device=q.device), (0.5, -1, 0, False, 0.0, 0.3)
    at = [torch.arange(n, device=q.device) for n in (2, 2, 3, 18)]
    keep = dropout_keep(rng, 0.3, *at).cpu()
    with running(on):
        out, lse = torch.ops.mcp_kernels.flash_attn(q, k, v, None, None, None, rng, *options)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
    own = [t.detach().cpu().double().requires_grad_() for t in (q, k, v)]
    wanted, wanted_lse = naive_attention(
        own[0], own[1], own[2], softmax_scale=0.5, causal=True, keep=keep, dropout_p=0.3
    )
    assert_close(out.detach().cpu(), wanted.detach(), 2)
    assert_close(lse.detach().cpu(), wanted_lse.detach(), 2)
    for grad, by_row in zip(grads, torch.autograd.grad(wanted.sum(), own), strict=True):
        assert_close(grad.cpu(), by_row, 4)
    with running(on):
        state = torch.get_rng_state()
        assert torch.equal(flash_attn_func(q, k, v, 0.0), flash_attn_func(q, k, v))
        assert torch.equal(torch.get_rng_state(), state)
        none = flash_attn_func(q, k, v, 1.0)
        assert (none == 0).all()
        assert not torch.autograd.grad(none.sum(), v)[0].any()
        with pytest.raises(ValueError, match=r"dropout_p must be in \[0, 1\]"):
            flash_attn_func(q, k, v, 1.5)


def test_case_17_sink(on: str) -> None:
    """In the denominator only; differentiable; one of -inf is none."""
    q, k, v = draw(on, 2, 3, 18, 2, 1, 4, 4)
    hold(on, q, k, v, sink=draw_one(on, 2, seed=9), window_size=(5, 1))
    none = torch.full((2,), -math.inf, dtype=dtype_of(on), device=q.device)
    assert_close(forward(on, q, k, v, sink=none), forward(on, q, k, v).double(), 2)


@pytest.mark.parametrize("of", ["lse", "out"])
def test_case_18_gradient_of_either_result(on: str, of: str) -> None:
    """Of lse alone, of out alone (and of both, in every other case)."""
    q, k, v = draw(on, 1, 3, 18, 2, 1, 4, 4)
    own = [t.detach().cpu().double().requires_grad_() for t in (q, k, v)]
    with running(on):
        out, lse = flash_attn_func(q, k, v, return_lse=True)
        grads = torch.autograd.grad((lse if of == "lse" else out).sum(), (q, k, v))
    wanted, wanted_lse = naive_attention(own[0], own[1], own[2])
    total = (wanted_lse if of == "lse" else wanted).sum() + 0 * own[2].sum()
    for grad, by_row in zip(grads, torch.autograd.grad(total, own), strict=True):
        assert_close(grad.cpu(), by_row, 4)


def test_case_19_the_same_bits_again_and_alone(on: str) -> None:
    q, k, v = draw(on, 2, 18, 20, 1, 1, 4, 4)
    first, second = (call(on, q, k, v, causal=True) for _ in range(2))
    results = ([r.out, r.lse, *r.grads] for r in (first, second))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert_same(on, first.out[1:], forward(on, q[1:], k[1:], v[1:], causal=True))


def test_case_20_errors_needed_gradients_and_inference(on: str) -> None:
    q, k, v = draw(on, 1, 3, 4, 1, 1, 4, 4)
    with running(on):
        with pytest.raises(TypeError, match="q, k and v must have one dtype"):
            flash_attn_func(q, k.double(), v)
        with pytest.raises(ValueError, match="must have one batch size, got 1, 2, 1"):
            flash_attn_func(q, k.expand(2, -1, -1, -1), v)
        expected = torch.autograd.grad(flash_attn_func(q, k, v).sum(), (q, k, v))
        for needed in range(3):
            own = [t.detach().requires_grad_(i == needed) for i, t in enumerate((q, k, v))]
            flash_attn_func(own[0], own[1], own[2]).sum().backward()
            assert [t.grad is not None for t in own] == [i == needed for i in range(3)]
            grad = own[needed].grad
            assert grad is not None
            assert torch.equal(grad, expected[needed])
        with torch.no_grad():
            assert flash_attn_func(q, k, v).grad_fn is None
        with torch.inference_mode():
            assert flash_attn_func(q, k, v).is_inference()
