"""scaled_dot_product_attention against torch's own, semantics and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mcp_kernels import scaled_dot_product_attention

SHAPES = [
    ((2, 4, 5, 6), (2, 4, 7, 6), (2, 4, 7, 3)),
    ((2, 4, 7, 6), (2, 4, 3, 6), (2, 4, 3, 6)),
    ((4, 5, 6), (4, 5, 6), (4, 5, 6)),
    ((5, 6), (7, 6), (7, 6)),
    ((3, 2, 4, 5, 6), (3, 2, 4, 7, 6), (3, 2, 4, 7, 6)),
    ((2, 4, 5, 6), (2, 1, 7, 6), (2, 1, 7, 6)),
]


def _draw(shapes: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes
    ]


def _compare(leaves: list[Tensor], **kwargs: Any) -> None:
    q, k, v = leaves[:3]
    out = scaled_dot_product_attention(q, k, v, **kwargs)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, **kwargs)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    weight = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, leaves, weight), torch.autograd.grad(expected, leaves, weight)
    )


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_equals_torch(shapes: Any, is_causal: bool) -> None:
    _compare(_draw(shapes), is_causal=is_causal, scale=0.3)


@pytest.mark.parametrize("mask_shape", [(2, 4, 5, 7), (5, 7), (4, 1, 7), (2, 1, 1, 7), (1, 1)])
def test_masks(mask_shape: tuple[int, ...]) -> None:
    leaves = _draw([*SHAPES[0], mask_shape])
    _compare(leaves, attn_mask=leaves[3])
    _compare(leaves[:3], attn_mask=leaves[3].detach() > -0.8)


def test_mask_with_many_leading_dimensions() -> None:
    leaves = _draw([*SHAPES[4], (2, 1, 5, 7)])
    _compare(leaves, attn_mask=leaves[3])


def test_grouped_heads() -> None:
    q, k, v = _draw([(2, 6, 5, 4), (2, 2, 7, 4), (2, 2, 7, 4)])
    _compare([q, k, v], enable_gqa=True)
    with pytest.raises(ValueError, match="fewer key heads need enable_gqa=True"):
        scaled_dot_product_attention(q, k, v)


def test_mask_and_causal_both_hide() -> None:
    q, k, v = _draw([(1, 1, 4, 3), (1, 1, 4, 3), (1, 1, 4, 3)])
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2:, 0] = False
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=True)
    both = mask & torch.ones(4, 4, dtype=torch.bool).tril()
    torch.testing.assert_close(
        out, torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=both)
    )


def test_rows_that_see_nothing_are_zero_with_zero_gradients() -> None:
    q, k, v = _draw([(1, 2, 3, 4)] * 3)
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[1] = False
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert (out[:, :, 1] == 0).all()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][:, :, 1] == 0).all()


def test_memory_order_and_empty_sizes() -> None:
    q, k, v = _draw(SHAPES[0])
    out = scaled_dot_product_attention(q, k, v)
    assert out.transpose(1, 2).is_contiguous()
    for shapes in ([(0, 2, 3, 4)] * 3, [(2, 0, 3, 4)] * 3, [(2, 2, 0, 4)] * 3):
        q, k, v = _draw(shapes)
        assert scaled_dot_product_attention(q, k, v).shape == shapes[0]
    out = scaled_dot_product_attention(
        torch.ones(1, 2, 4), torch.ones(1, 0, 4), torch.ones(1, 0, 4)
    )
    assert torch.equal(out, torch.zeros(1, 2, 4))


def test_dropout_keeps_the_mean() -> None:
    q, k = torch.zeros(1, 1, 50, 4), torch.zeros(1, 1, 2000, 4)
    v = torch.ones(1, 1, 2000, 1)
    out = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    # A row is a mean of 2000 draws of 0 or 2: deviation 1 / sqrt(2000).
    assert float((out - 1).abs().max()) < 6 / math.sqrt(2000)
    assert float(out.std()) > 0
