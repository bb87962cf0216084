"""Attention over a KV cache: append, rotate, pages, padding, against attention without a cache."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import mcp_kernels
from mcp_kernels import flash_attn_func, flash_attn_with_kvcache
from mcp_kernels.ops.rotary import rotate

H, N, D = 4, 2, 6


def _draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _caches(entries: int, capacity: int) -> tuple[Tensor, Tensor]:
    return _draw(entries, capacity, N, D, seed=1), _draw(entries, capacity, N, D, seed=2)


def _expected(
    q: Tensor, keys: list[Tensor], values: list[Tensor], **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Each batch entry with its own keys, by ``flash_attn_func``."""
    results = [
        flash_attn_func(q[b : b + 1], k[None], v[None], return_lse=True, **kwargs)
        for b, (k, v) in enumerate(zip(keys, values, strict=True))
    ]
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])


@pytest.mark.parametrize("kwargs", [{}, {"causal": True}, {"window_size": (2, 1), "softcap": 1.5}])
@pytest.mark.parametrize("rows", [1, 3])
def test_lengths_and_append(rows: int, kwargs: dict[str, Any]) -> None:
    lengths, new = [0, 5, 2], 3
    q, k, v = _draw(3, rows, H, D), _draw(3, new, N, D), _draw(3, new, N, D, seed=9)
    k_cache, v_cache = _caches(3, 10)
    before_k, before_v = k_cache.clone(), v_cache.clone()
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=torch.tensor(lengths, dtype=torch.int32), **kwargs,
        return_softmax_lse=True,
    )  # fmt: skip
    keys = [before_k[b, :n] for b, n in enumerate(lengths)]
    values = [before_v[b, :n] for b, n in enumerate(lengths)]
    torch.testing.assert_close((out, lse), _expected(q, keys, values, **kwargs))
    assert (out[0] == 0).all()
    assert (lse[0] == -math.inf).all()
    assert torch.equal(k_cache, before_k)

    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=torch.tensor(lengths), **kwargs
    )
    keys = [torch.cat([own, k[b]]) for b, own in enumerate(keys)]
    values = [torch.cat([own, v[b]]) for b, own in enumerate(values)]
    torch.testing.assert_close(out, _expected(q, keys, values, **kwargs)[0])
    for b, length in enumerate(lengths):
        assert torch.equal(k_cache[b, length : length + new], k[b])
        assert torch.equal(v_cache[b, length : length + new], v[b])
        untouched = [i for i in range(10) if not length <= i < length + new]
        assert torch.equal(k_cache[b, untouched], before_k[b, untouched])


def test_int_length_and_full_cache() -> None:
    q, (k_cache, v_cache) = _draw(2, 1, H, D), _caches(2, 7)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=4)
    torch.testing.assert_close(out, flash_attn_func(q, k_cache[:, :4], v_cache[:, :4]))
    out = flash_attn_with_kvcache(q, k_cache, v_cache)
    torch.testing.assert_close(out, flash_attn_func(q, k_cache, v_cache))


def test_keys_past_the_length_may_be_nan() -> None:
    q, (k_cache, v_cache) = _draw(1, 2, H, D), _caches(1, 7)
    clean = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=4, causal=True)
    k_cache[:, 4:], v_cache[:, 4:] = math.nan, math.nan
    assert torch.equal(
        flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=4, causal=True), clean
    )


def test_batch_index_and_left_padding() -> None:
    q, k, v = _draw(2, 2, H, D), _draw(2, 2, N, D), _draw(2, 2, N, D, seed=5)
    k_cache, v_cache = _caches(4, 9)
    index, pad = torch.tensor([3, 1]), torch.tensor([2, 0])
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=torch.tensor([5, 6]), cache_batch_idx=index,
        cache_leftpad=pad, causal=True,
    )  # fmt: skip
    keys, values = ([c[3, 2:7], c[1, :8]] for c in (k_cache, v_cache))
    torch.testing.assert_close(out, _expected(q, keys, values, causal=True)[0])
    assert torch.equal(k_cache[3, 5:7], k[0])
    assert torch.equal(v_cache[1, 6:8], v[1])


@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_pages_of_any_size(page_size: int) -> None:
    lengths, new = [5, 0, 3], 2
    q, k, v = _draw(3, 2, H, D), _draw(3, new, N, D), _draw(3, new, N, D, seed=5)
    flat_k, flat_v = _caches(3, 8)
    pages = -(-8 // page_size)
    order = torch.randperm(3 * pages, generator=torch.Generator().manual_seed(3))
    table = order.view(3, pages).to(torch.int32)
    paged_k, paged_v = (torch.full((3 * pages, page_size, N, D), math.nan).double() for _ in "kv")
    for b, length in enumerate(lengths):
        for j in range(length):
            page = int(table[b, j // page_size])
            paged_k[page, j % page_size] = flat_k[b, j]
            paged_v[page, j % page_size] = flat_v[b, j]
        table[b, -(-(length + new) // page_size) :] = -1  # never read
    seqlens = torch.tensor(lengths)
    out = flash_attn_with_kvcache(
        q, paged_k, paged_v, k, v, cache_seqlens=seqlens, block_table=table, causal=True
    )
    expected = flash_attn_with_kvcache(q, flat_k, flat_v, k, v, cache_seqlens=seqlens, causal=True)
    assert torch.equal(out, expected)
    page, offset = table[0, 6 // page_size], 6 % page_size
    assert torch.equal(paged_k[page, offset], k[0, 1])


def _angles(positions: int, pairs: int) -> Tensor:
    frequency = 100.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    return torch.outer(torch.arange(positions, dtype=torch.float64), frequency)


@pytest.mark.parametrize("is_interleaved", [True, False])
def test_rotation_is_that_of_complex_numbers(is_interleaved: bool) -> None:
    x, angles = _draw(2, 4, 3, D), _angles(9, 2)
    turned = rotate(x, angles.cos(), angles.sin(), range(3, 7), is_interleaved)
    first = [0, 2] if is_interleaved else [0, 1]
    second = [1, 3] if is_interleaved else [2, 3]
    as_complex = torch.complex(x[..., first], x[..., second])
    as_complex = as_complex * torch.polar(torch.ones(4, 1, 2).double(), angles[3:7, None])
    torch.testing.assert_close(turned[..., first], as_complex.real)
    torch.testing.assert_close(turned[..., second], as_complex.imag)
    assert torch.equal(turned[..., 4:], x[..., 4:])


@pytest.mark.parametrize("causal", [True, False])
def test_rotary_positions(causal: bool) -> None:
    length, new = 4, 2
    q, k, v = _draw(1, new, H, D), _draw(1, new, N, D), _draw(1, new, N, D, seed=5)
    (k_cache, v_cache), angles = _caches(1, 8), _angles(10, 3)
    cos, sin = angles.cos(), angles.sin()
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cos, sin, cache_seqlens=length, causal=causal
    )
    turned_k = rotate(k, cos, sin, range(length, length + new), True)
    q_positions = range(length, length + new) if causal else range(length, length + 1)
    turned_q = rotate(q, cos, sin, q_positions, True)
    assert torch.equal(k_cache[:, length : length + new], turned_k)
    expected = flash_attn_func(turned_q, k_cache[:, :6], v_cache[:, :6], causal=causal)
    torch.testing.assert_close(out, expected)


def test_generation_step_by_step_equals_one_causal_pass() -> None:
    rows = 6
    q, k, v = _draw(2, rows, H, D), _draw(2, rows, N, D), _draw(2, rows, N, D, seed=4)
    k_cache, v_cache = torch.zeros(2, 8, N, D).double(), torch.zeros(2, 8, N, D).double()
    steps = [
        flash_attn_with_kvcache(
            q[:, i : i + 1], k_cache, v_cache, k[:, i : i + 1], v[:, i : i + 1], cache_seqlens=i,
            causal=True,
        )
        for i in range(rows)
    ]  # fmt: skip
    torch.testing.assert_close(torch.cat(steps, 1), flash_attn_func(q, k, v, causal=True))


def test_opcheck() -> None:
    q, k, v = _draw(1, 2, H, D), _draw(1, 1, N, D), _draw(1, 1, N, D)
    k_cache, v_cache = _caches(1, 5)
    args = (q, k_cache, v_cache, k, v, None, None, torch.tensor([3]), None, None, None, None, None,
            True, 0.5, -1, 0, False, 0.0)  # fmt: skip
    torch.library.opcheck(torch.ops.mcp_kernels.flash_attn_kvcache.default, args)


def test_nothing_is_written_when_an_entry_does_not_fit() -> None:
    q, k, v = _draw(2, 1, H, D), _draw(2, 2, N, D), _draw(2, 2, N, D)
    k_cache, v_cache = _caches(2, 6)
    before = k_cache.clone()
    with pytest.raises(ValueError, match="k_cache must hold entry 1 with 7 keys, got 2 entries of"):
        flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=torch.tensor([1, 5]))
    assert torch.equal(k_cache, before)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"v": None}, ValueError, "k and v must be given together"),
        ({"cache_seqlens": None}, ValueError, "cache_seqlens must be given with k"),
        ({"cache_batch_idx": torch.tensor([1, 1])}, ValueError, "must name no entry twice"),
        ({"rotary_cos": torch.zeros(9, 2)}, ValueError, "rotary_cos and rotary_sin must be given"),
        ({"cache_leftpad": torch.tensor([4, 0])}, ValueError, "must be at least cache_leftpad"),
        ({"block_table": torch.tensor([[0], [5]])}, ValueError, r"must name pages in \[0, 1\]"),
        ({"block_table": torch.zeros(2, 0).int()}, ValueError, "must have pages for 5 positions"),
        ({"q": torch.zeros(2, 1, H, D).double().requires_grad_()}, RuntimeError, "has no backward"),
        (
            {"cache_seqlens": torch.tensor([1.0, 2.0])},
            ValueError,
            "cache_seqlens must be an int or",
        ),
        ({"k": torch.zeros(2, 2, 1, D).double()}, ValueError, "k and v must agree"),
    ],
)
def test_errors(change: dict[str, Any], error: type[Exception], match: str) -> None:
    k_cache, v_cache = _caches(2, 6)
    arguments: dict[str, Any] = {"q": _draw(2, 1, H, D), "k_cache": k_cache, "v_cache": v_cache}
    arguments |= {"k": _draw(2, 2, N, D), "v": _draw(2, 2, N, D), "cache_seqlens": 3} | change
    with pytest.raises(error, match="flash_attn_with_kvcache: .*" + match):
        flash_attn_with_kvcache(**arguments)


@pytest.mark.parametrize("context", [contextlib.nullcontext, mcp_kernels.reference_only])
def test_every_body_finds_an_entry_that_is_named_twice(context):
    """Of the op itself, as a compiled graph and each sample of a map call it."""
    caches = [torch.zeros(3, 5, 2, 4) for _ in range(2)]
    q, new = torch.ones(2, 1, 2, 4), torch.ones(2, 1, 2, 4)
    op = torch.ops.mcp_kernels.flash_attn_kvcache
    lengths, entries = torch.tensor([1, 2]), torch.tensor([2, 2])
    rest = (None, None, lengths, entries, None, None, None, None, True, 1.0, -1, -1, False, 0.0)
    with context(), pytest.raises(ValueError, match="cache_batch_idx must name no entry twice"):
        op(q, *caches, new, new, *rest)
    assert not any(cache.any() for cache in caches)
