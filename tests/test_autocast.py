"""torch.autocast: the public functions compute in its dtype, and gradients come back in theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mcp_kernels import (
    all_gather_matmul,
    flash_attn_func,
    flash_attn_varlen_func,
    matmul_all_reduce,
    matmul_reduce_scatter,
    scaled_dot_product_attention,
)


def _varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ends = torch.tensor([0, 3])
    return flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 3, 3)


def _several(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.cat(all_gather_matmul(x, [weight, weight], [bias, None]))


ATTENTION = [(1, 3, 2, 4)] * 3
LINEAR = [(3, 4), (5, 4), (5,)]
CALLS = [
    (flash_attn_func, ATTENTION),
    (_varlen, ATTENTION),
    (scaled_dot_product_attention, ATTENTION),
    (matmul_all_reduce, LINEAR),
    (matmul_reduce_scatter, LINEAR),
    (all_gather_matmul, LINEAR),
    (_several, LINEAR),
]


@pytest.mark.parametrize(("function", "shapes"), CALLS, ids=lambda v: getattr(v, "__name__", ""))
def test_computes_in_autocast_dtype(function: Any, shapes: list[tuple[int, ...]]) -> None:
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = function(*leaves)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, function(*(t.bfloat16() for t in leaves)))
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(g.dtype == torch.float32 for g in grads)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert function(*(t.double() for t in leaves)).dtype == torch.float64
