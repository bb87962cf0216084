"""Rows of attention that share tiles and tasks on the CPU, and rows under large masks."""

from __future__ import annotations

import math

import pytest
import torch
from test_flash_attn_cpu import ISAS, U, draw, isa, threads

from mcp_kernels import flash_attn_func
from mcp_kernels.testing import assert_same_bits

__all__ = ["isa"]

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(not ISAS, reason="a pure-Python install has no compiled body"),
]


def test_threads_do_not_change_what_is_beside_a_nan(isa: str) -> None:
    """Key 383 ends a tile that rows of several tasks begin to see: all of them handle it alike."""
    q, k, v, _ = draw(1, 500, 500, 4, 1, 16, 16, dtype=torch.float32)
    v[0, 383] = math.nan
    with torch.no_grad():
        expected = flash_attn_func(q, k, v, causal=True)
        with threads(3):
            got = flash_attn_func(q, k, v, causal=True)
    assert expected[:, :383].isfinite().all()
    assert expected[:, 383:].isnan().all()
    assert_same_bits(got, expected)


@pytest.mark.parametrize("mask", [-1e9, -1e12, 1e12, torch.finfo(torch.float32).min])
def test_rows_of_a_large_finite_mask_are_uniform(isa: str, mask: float) -> None:
    """Next to such a number scores vanish: all keys weigh the same, and lse is the number."""
    q, k, v, _ = draw(1, 20, 200, 2, 2, 16, 16, dtype=torch.float32)
    bias = torch.full((20, 200), mask)
    out, lse = flash_attn_func(q, k, v, bias=bias, return_lse=True)
    mean = v.mean(1, keepdim=True).expand_as(out)
    torch.testing.assert_close(out, mean, rtol=0, atol=200 * U * float(v.abs().max()))
    torch.testing.assert_close(lse, torch.full_like(lse, mask), rtol=4 * U, atol=0)


@pytest.mark.parametrize("rows", [1, 20, 300])
def test_heads_of_no_width_still_have_an_lse(isa: str, rows: int) -> None:
    """Scores of nothing are 0: lse is the logarithm of the number of keys."""
    q, k, v, _ = draw(1, rows, 70, 2, 2, 0, 0, dtype=torch.float32)
    out, lse = flash_attn_func(q, k, v, softmax_scale=1.0, return_lse=True)
    assert out.shape == q.shape
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(70)), rtol=8 * U, atol=0)
