"""Dropout in attention: one mask for every tiling, the right rate, forward and backward alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from naive_attention import naive_attention
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mcp_kernels import flash_attn_func
from mcp_kernels.ops.attention_mask import dropout_keep
from mcp_kernels.ops.philox import philox


def _positions(*sizes: int) -> list[Tensor]:
    return [torch.arange(size) for size in sizes]


def test_mask_is_the_documented_function() -> None:
    rng, p = torch.tensor([123456789012345, 7]), 0.37
    keep = dropout_keep(rng, p, *_positions(2, 3, 5, 10))
    for b, h, i, j in ((0, 0, 0, 0), (1, 2, 4, 9), (1, 0, 3, 6), (0, 2, 1, 7)):
        words = philox(123456789012345, torch.tensor([j // 4, i, h + (b << 16), 7]))
        assert bool(keep[b, h, i, j]) == (int(words[j % 4]) >= p * 2**32)


def test_mask_does_not_depend_on_tiling() -> None:
    rng = torch.tensor([3, 0])
    batch, heads, rows, keys = _positions(3, 2, 20, 30)
    whole = dropout_keep(rng, 0.5, batch, heads, rows, keys)
    part = dropout_keep(rng, 0.5, batch[1:], heads[1:], rows[7:13], keys[5:23])
    assert torch.equal(part, whole[1:, 1:, 7:13, 5:23])
    scattered = torch.tensor([2, 11, 29])
    assert torch.equal(dropout_keep(rng, 0.5, batch, heads, rows, scattered), whole[..., scattered])


def test_rate() -> None:
    p, count = 0.3, 4 * 8 * 50 * 100
    kept = dropout_keep(torch.tensor([11, 0]), p, *_positions(4, 8, 50, 100)).double()
    # A mean of n draws has deviation sqrt(p (1 - p) / n); six is one false alarm in 5e8.
    assert abs(float(kept.mean()) - (1 - p)) < 6 * (p * (1 - p) / count) ** 0.5


@pytest.mark.parametrize("kwargs", [{}, {"causal": True, "softcap": 1.0}], ids=str)
def test_equals_rows_under_the_mask(kwargs: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, 5, 4, 3), (2, 7, 2, 3), (2, 7, 2, 4))
    q, k, v = leaves = [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in sizes
    ]
    torch.manual_seed(9)
    out, lse, p = flash_attn_func(q, k, v, 0.4, **kwargs, return_attn_probs=True)
    keep = p >= 0
    expected, expected_lse = naive_attention(q, k, v, **kwargs, keep=keep, dropout_p=0.4)
    assert 0 < int((~keep).sum()) < keep.numel()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    got = torch.autograd.grad((out * weight).sum() + lse.sum(), leaves)
    wanted = torch.autograd.grad((expected * weight).sum() + expected_lse.sum(), leaves)
    torch.testing.assert_close(got, wanted)


def test_zero_is_no_dropout_and_one_drops_all() -> None:
    q, k, v = (torch.randn(1, 3, 2, 4, requires_grad=True) for _ in range(3))
    state = torch.get_rng_state()
    out = flash_attn_func(q, k, v, 0.0)
    assert torch.equal(torch.get_rng_state(), state)  # nothing was drawn
    assert torch.equal(out, flash_attn_func(q, k, v))
    out = flash_attn_func(q, k, v, 1.0)
    assert (out == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_seed_follows_the_default_generator() -> None:
    q, k, v = (torch.randn(2, 9, 2, 4) for _ in range(3))

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return flash_attn_func(q, k, v, 0.5)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    torch.manual_seed(1)
    assert not torch.equal(flash_attn_func(q, k, v, 0.5), flash_attn_func(q, k, v, 0.5))


def test_recomputation_draws_the_same_mask() -> None:
    q, k, v = (torch.randn(2, 9, 2, 4, requires_grad=True) for _ in range(3))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, 0.5)

    torch.manual_seed(4)
    plain = torch.autograd.grad(run(q, k, v).sum(), (q, k, v))
    torch.manual_seed(4)
    again = torch.autograd.grad(
        checkpoint(run, q, k, v, use_reentrant=False).sum(),  # pyright: ignore[reportOptionalMemberAccess]
        (q, k, v),
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
