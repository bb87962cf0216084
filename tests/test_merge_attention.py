"""merge_attention: parts of the keys joined are all the keys."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from mcp_kernels import flash_attn_func, merge_attention


def _leaves(keys: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 4, 5), (2, keys, 2, 5), (2, keys, 2, 5))
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes
    ]


def _merged(leaves: list[Tensor], cuts: list[int], bias: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = leaves
    parts = [
        flash_attn_func(
            q, k[:, a:b], v[:, a:b], bias=bias[..., a:b], return_lse=True
        )
        for a, b in pairwise(cuts)
    ]  # fmt: skip
    return merge_attention([out for out, _ in parts], [lse for _, lse in parts])


@pytest.mark.parametrize("cuts", [[0, 9], [0, 4, 9], [0, 0, 2, 2, 7, 9]], ids=str)
def test_parts_joined_equal_the_whole(cuts: list[int]) -> None:
    leaves = _leaves(9)
    bias = torch.zeros(2, 4, 3, 9, dtype=torch.float64)
    bias[:, :, 0] = -math.inf  # a row that no part sees
    bias[:, :, 1, :5] = -math.inf  # a row that some parts do not see
    bias[:, 1] += 500.0  # normalisers far apart from other heads'
    out, lse = _merged(leaves, cuts, bias)
    q, k, v = leaves
    whole, whole_lse = flash_attn_func(q, k, v, bias=bias, return_lse=True)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)
    weights = torch.randn_like(out), torch.randn_like(lse)

    def loss(out: Tensor, lse: Tensor) -> Tensor:
        return (out * weights[0]).sum() + (lse * weights[1])[..., 1:].sum()

    got = torch.autograd.grad(loss(out, lse), leaves)
    torch.testing.assert_close(got, torch.autograd.grad(loss(whole, whole_lse), leaves))


def test_order_of_parts_does_not_matter_and_stacks_are_taken() -> None:
    outs, lses = torch.randn(3, 7, 2, 4), torch.randn(3, 2, 7) * 30
    out, lse = merge_attention(outs, lses)
    assert out.dtype == torch.float32
    back_out, back_lse = merge_attention(outs.flip(0), lses.flip(0))
    torch.testing.assert_close(out, back_out)
    torch.testing.assert_close(lse, back_lse)
    torch.testing.assert_close(lse, torch.logsumexp(lses, 0))


def test_gradcheck() -> None:
    outs = torch.randn(2, 3, 1, 2, dtype=torch.float64, requires_grad=True)
    lses = torch.randn(2, 1, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(merge_attention, (outs, lses))
    assert torch.autograd.gradgradcheck(merge_attention, (outs, lses))


def test_errors() -> None:
    with pytest.raises(ValueError, match="merge_attention: outs and lses must be as many"):
        merge_attention([], [])
    with pytest.raises(ValueError, match="merge_attention: every out must be"):
        merge_attention([torch.zeros(1, 2, 3, 4)], [torch.zeros(1, 2, 3)])
