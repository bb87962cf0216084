"""The attention ops against attention row by row: every feature, forward and both backwards."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from naive_attention import naive_attention
from torch import Tensor

from mcp_kernels.ops.attention import make_inputs
from mcp_kernels.ops.attention_composite import attention_composite
from mcp_kernels.ops.attention_functions import flash_attn_func
from mcp_kernels.ops.attention_mask import AttentionOptions


@dataclass(frozen=True)
class Case:
    name: str
    sizes: tuple[int, ...] = (2, 5, 7, 4, 2, 6, 6)
    """B, Sq, Sk, H, N, D, E."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    bias: tuple[int, ...] | None = None
    bias_is_bool: bool = False
    alibi: tuple[int, ...] | None = None
    has_sink: bool = False


CASES = [
    Case("plain"),
    Case("one_row_one_key", sizes=(1, 1, 1, 1, 1, 1, 1)),
    Case("scale_zero", kwargs={"softmax_scale": 0.0}),
    Case("scale_negative", kwargs={"softmax_scale": -0.7}),
    Case("causal_more_keys", kwargs={"causal": True}),
    Case("causal_more_rows", sizes=(2, 9, 4, 2, 2, 5, 5), kwargs={"causal": True}),
    Case("causal_top_left", kwargs={"causal": True, "causal_align": "top_left"}),
    Case(
        "causal_top_left_more_rows",
        sizes=(1, 9, 4, 2, 1, 5, 5),
        kwargs={"causal": True, "causal_align": "top_left"},
    ),
    Case("window", kwargs={"window_size": (2, 1)}),
    Case("window_left", kwargs={"window_size": (1, -1)}),
    Case("window_right", kwargs={"window_size": (-1, 0)}),
    Case("window_diagonal", kwargs={"window_size": (0, 0)}),
    Case("window_causal", kwargs={"window_size": (2, 3), "causal": True}),
    Case("window_top_left", kwargs={"window_size": (1, 2), "causal_align": "top_left"}),
    Case(
        "window_dead_rows", sizes=(1, 12, 3, 2, 2, 4, 4), kwargs={"window_size": (1, 0)}
    ),
    Case("softcap", kwargs={"softcap": 0.8, "causal": True}),
    Case("alibi", alibi=(4,)),
    Case("alibi_batch", alibi=(2, 4), kwargs={"causal": True}),
    Case("bias_full", bias=(2, 4, 5, 7)),
    Case("bias_row", bias=(7,), kwargs={"causal": True}),
    Case("bias_head", bias=(4, 1, 7)),
    Case("bias_batch", bias=(2, 1, 5, 1), kwargs={"softcap": 1.5}),
    Case("mask_full", bias=(2, 4, 5, 7), bias_is_bool=True),
    Case("mask_row", bias=(2, 1, 1, 7), bias_is_bool=True, kwargs={"causal": True}),
    Case("sink", has_sink=True),
    Case("sink_dead_rows", sizes=(2, 9, 4, 2, 1, 5, 3), has_sink=True, kwargs={"causal": True}),
    Case("value_dim", sizes=(2, 5, 7, 6, 2, 4, 9), kwargs={"causal": True}),
    Case("odd_sizes", sizes=(3, 13, 11, 3, 1, 7, 5), kwargs={"window_size": (4, 2)}),
    Case(
        "everything",
        bias=(2, 4, 5, 7),
        alibi=(4,),
        has_sink=True,
        kwargs={"softcap": 1.2, "window_size": (3, -1), "causal": True, "softmax_scale": 0.9},
    ),
]  # fmt: skip


def make(case: Case, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], dict[str, Any]]:
    """(leaves q, k, v, bias and sink, keyword arguments of ``flash_attn_func``)."""
    generator = torch.Generator().manual_seed(sum(map(ord, case.name)))

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        return drawn.requires_grad_()

    batch, rows, keys, heads, kv_heads, dim, value_dim = case.sizes
    leaves = [
        draw(batch, rows, heads, dim),
        draw(batch, keys, kv_heads, dim),
        draw(batch, keys, kv_heads, value_dim),
    ]
    kwargs = dict(case.kwargs)
    if case.bias is not None:
        kwargs["bias"] = draw(*case.bias)
        if case.bias_is_bool:
            kwargs["bias"] = kwargs["bias"].detach() > -0.5
        else:
            leaves.append(kwargs["bias"])
    if case.alibi is not None:
        kwargs["alibi_slopes"] = torch.rand(case.alibi, generator=generator)
    if case.has_sink:
        kwargs["sink"] = draw(heads)
        leaves.append(kwargs["sink"])
    return leaves, kwargs


def weigh(out: Tensor, lse: Tensor) -> Tensor:
    """A loss that depends on every element of both; -inf rows of lse are constants."""
    generator = torch.Generator().manual_seed(4)
    dout, dlse = (
        torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in (out, lse)
    )
    return (out.double() * dout).sum() + (
        lse.double().masked_fill(lse == -math.inf, 0) * dlse
    ).sum()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_rows(case: Case, poisoned_memory: None) -> None:
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


# More rows than a block, batches that share a chunk, heads that do not fit one chunk, and rows that
# see no key at all.
BLOCK_SIZES = [
    (1, 300, 300, 2, 1, 8, 8),
    (2, 140, 333, 4, 2, 4, 6),
    (1, 333, 140, 2, 2, 4, 4),
    (70, 9, 9, 2, 2, 4, 4),
    (3, 40, 2100, 8, 8, 4, 4),
]
BLOCK_KWARGS = [
    {},
    {"causal": True},
    {"window_size": (50, 20)},
    {"window_size": (30, 0), "causal_align": "top_left"},
]


@pytest.mark.parametrize("sizes", BLOCK_SIZES, ids=str)
@pytest.mark.parametrize("kwargs", BLOCK_KWARGS, ids=str)
def test_many_blocks_equal_one_matrix(sizes: tuple[int, ...], kwargs: dict[str, Any]) -> None:
    leaves, kwargs = make(Case("blocks", sizes=sizes, kwargs=kwargs, has_sink=True))
    q, k, v, sink = leaves
    out, lse = flash_attn_func(q, k, v, **kwargs, return_lse=True)
    left, right = kwargs.get("window_size", (-1, -1))
    right = 0 if kwargs.get("causal") else right
    top_left = kwargs.get("causal_align") == "top_left"
    options = AttentionOptions(q.shape[3] ** -0.5, left, right, top_left, 0.0, 0.0)
    inputs = make_inputs((q, k, v), None, None, sink, None, options)
    expected_out, expected_lse = attention_composite(inputs)
    torch.testing.assert_close(out, expected_out, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-11, atol=1e-12)
    got = torch.autograd.grad(weigh(out, lse), leaves)
    expected = torch.autograd.grad(weigh(expected_out, expected_lse), leaves)
    for actual, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-11)
