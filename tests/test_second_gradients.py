"""Second derivatives through the tensor-parallel ops against the unsharded block.

A gradient penalty: the loss L of a column-parallel and a row-parallel layer, then P = the squared
norm of L's gradient, then the gradient of P. P sums what the ranks hold of it, so that it is one
value of the group, as the convention of ``collectives.py`` asks.
"""

from __future__ import annotations

import pytest
import torch
from parallel_matmul import carried, carriers
from ranks import RankPool
from torch import Tensor

from mcp_kernels import all_gather_matmul, all_reduce, matmul_all_reduce, matmul_reduce_scatter

ROWS, WIDTH, HIDDEN, OUT = 12, 5, 12, 7


def _values(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _whole() -> list[Tensor]:
    """x, the two weights and the second bias of the unsharded block."""
    shapes = ((ROWS, WIDTH), (HIDDEN, WIDTH), (OUT, HIDDEN), (OUT,))
    return [_values(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]


def _expected() -> tuple[Tensor, ...]:
    leaves = _whole()
    x, up, down, bias = leaves
    loss = ((x @ up.t()).tanh() @ down.t() + bias).pow(3).sum()
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)


def _held(rank: int, world: int, whole: list[Tensor], cuts_rows: bool) -> list[Tensor]:
    """What a rank holds of x, the weights and the bias."""
    x, up, down, bias = whole
    return [
        x.chunk(world, 0)[rank] if cuts_rows else x,
        up.chunk(world, 0)[rank],
        down.chunk(world, 1)[rank],
        bias,
    ]


def _penalty(rank: int, world: int, form: str) -> None:
    cuts_rows = form == "rows over ranks"
    whole = [t.detach() for t in _whole()]
    own = [t.clone().requires_grad_() for t in _held(rank, world, whole, cuts_rows)]
    x, up, down, bias = own
    hidden = all_gather_matmul(x, up, gather_dim=0 if cuts_rows else None).tanh()
    if form == "replicated":
        loss = matmul_all_reduce(hidden, down, bias).pow(3).sum()
    else:
        y = matmul_reduce_scatter(hidden, down, bias, scatter_dim=0 if cuts_rows else -1)
        loss = all_reduce(y.pow(3).sum())
    first = torch.autograd.grad(loss, own, create_graph=True)
    squares = [g.square().sum() for g in first]
    cut = squares[1] + squares[2] + (squares[0] if cuts_rows else 0)
    replicated = squares[3] + (0 if cuts_rows else squares[0])
    got = torch.autograd.grad(all_reduce(cut) + replicated, own)
    wanted = _held(rank, world, list(_expected()), cuts_rows)
    for actual, exact in zip(got, wanted, strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-11, atol=1e-10)


@carriers
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("form", ["replicated", "rows over ranks", "results over ranks"])
def test_gradient_penalty(ranks: RankPool, carrier: str, world: int, form: str) -> None:
    ranks.run(carried, carrier, _penalty, form, ranks=world)
