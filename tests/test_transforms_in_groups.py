"""torch.func over ops whose ranks communicate: every rank maps and derives as autograd does.

Autograd's own gradients in groups are held to one rank's elsewhere; here they are what to equal.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jacrev, vmap

import mcp_kernels as m
from mcp_kernels import nn

WORLD = 2
# As in test_transform_table.py, over terms of two ranks.
ROUNDINGS = 2 * 100 * 6 * 8


def functions(rank: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Of a ``[2, 4, 4]`` that all ranks hold; each rank uses it in its own way."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    weights, bias, others = draw(WORLD, 6, 4)[rank], draw(6), draw(WORLD, 6, 4)[rank]

    def make(kind: type, *sizes: int, **options: bool) -> torch.nn.Module:
        return kind(*sizes, dtype=torch.float64, **options)

    column, row = nn.ColumnParallelLinear, nn.RowParallelLinear
    return {
        "all_reduce": lambda x: m.all_reduce(x * (rank + 1)),
        "reduce_scatter": lambda x: m.reduce_scatter(x * (rank + 1), scatter_dim=1),
        "all_gather": lambda x: m.all_gather(x * (rank + 1), gather_dim=1) * (rank + 2),
        "copy_to_group": lambda x: m.copy_to_group(x) * (rank + 1),
        "matmul_all_reduce": lambda x: m.matmul_all_reduce(x, weights, bias),
        "matmul_all_reduce, weight": lambda x: m.matmul_all_reduce(x, x[0] * (rank + 1)),
        "matmul_reduce_scatter": lambda x: m.matmul_reduce_scatter(x, weights, bias, scatter_dim=1),
        "matmul_reduce_scatter, weight": lambda x: m.matmul_reduce_scatter(x, x[1] * (rank + 1)),
        "all_gather_matmul": lambda x: m.all_gather_matmul(x, weights, bias, gather_dim=1),
        "all_gather_matmul of two": lambda x: sum(
            m.all_gather_matmul(x, [weights, others * x.sum()], [bias, None], save_gathered=False)
        ),
        "replicated": lambda x: m.all_gather_matmul(x, weights, bias, gather_dim=None),
        "ColumnParallelLinear": make(column, 4, 6, gather_output=True),
        "ColumnParallelLinear of parts": make(column, 4, 6, sequence_parallel=True),
        "RowParallelLinear": make(row, 4, 6, input_is_parallel=False),
        "RowParallelLinear to parts": make(row, 8, 6, sequence_parallel=True),
    }


def by_autograd(loss: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    [found] = torch.autograd.grad(loss(leaf), leaf)
    return found


def slope(call: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
    """A gradient's square: the one way to ``weight`` is through what backward is given."""
    return grad(lambda y: (call(y) * weight).sum())(x).square().sum()


def slope_by_autograd(call: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    [first] = torch.autograd.grad((call(leaf) * weight).sum(), leaf, create_graph=True)
    return first.square().sum()


def transforms_and_autograd(rank: int, world: int) -> dict[str, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 4, dtype=torch.float64)
    both = torch.stack([x, 2 * x])
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, call in functions(rank).items():

        def loss(x: Tensor, call: Callable[[Tensor], Tensor] = call) -> Tensor:
            return call(x).square().sum()

        weight = call(x).detach().sin() + 1
        leaf = x.clone().requires_grad_()
        out = call(leaf)
        douts = torch.stack([torch.ones_like(out), out.detach()])
        one_by_one = [torch.autograd.grad(out, leaf, d, retain_graph=True)[0] for d in douts]
        together = torch.autograd.grad(out, leaf, douts, is_grads_batched=True)[0]
        pairs = [
            (grad(loss)(x), by_autograd(loss, x)),
            (vmap(call, 2)(both.movedim(0, 2)), torch.stack([call(s) for s in both])),
            (vmap(grad(loss))(both), torch.stack([by_autograd(loss, s) for s in both])),
            (
                grad(slope, 2)(call, x, weight),
                by_autograd(lambda w, call=call: slope_by_autograd(call, x, w), weight),
            ),
            (jacrev(call)(x), torch.autograd.functional.jacobian(call, x)),
            (together, torch.stack(one_by_one)),
        ]
        found[name] = [(a.detach(), b.detach()) for a, b in pairs]
    return found


def test_transforms_are_autograd_over_ranks(ranks) -> None:
    for result in ranks.run(transforms_and_autograd, ranks=WORLD):
        for name, pairs in result.items():
            for number, (got, wanted) in enumerate(pairs):
                bound = ROUNDINGS * torch.finfo(torch.float64).eps * max(1, wanted.abs().max())
                assert (got - wanted).abs().max() <= bound, (name, number)


def refusals(rank: int, world: int) -> list[str]:
    x, tokens = torch.ones(3, 4), torch.arange(6)
    layers = [
        (nn.ColumnParallelLinear(4, 6), x),
        (nn.VocabParallelEmbedding(8, 4), tokens),
    ]
    words = []
    for layer, given in layers:
        for parameters in (
            dict(layer.named_parameters()),
            {name: p.to_local().detach() for name, p in layer.named_parameters()},
        ):

            def loss(p: dict[str, Tensor], layer: torch.nn.Module = layer, x=given) -> Tensor:
                return functional_call(layer, p, (x,)).sum()

            with pytest.raises(ValueError, match="must") as raised:
                grad(loss)(parameters)
            words.append(str(raised.value).split(",")[0])
    mapped = vmap(layers[0][0])(torch.stack([x, x]))  # autograd around a map reaches DTensors
    mapped.sum().backward()
    wanted = torch.full((3, 4), 6.0)  # two samples of three rows of ones
    assert torch.equal(layers[0][0].weight.grad.to_local(), wanted)
    return words


def test_what_torch_func_cannot_take_is_said(ranks) -> None:
    for words in ranks.run(refusals, ranks=WORLD):
        assert words == [
            "to_local: parameters must not be DTensors that torch.func differentiates or maps",
            "ColumnParallelLinear: weight must be a DTensor or have all 6 rows",
            "to_local: parameters must not be DTensors that torch.func differentiates or maps",
            "VocabParallelEmbedding: weight must be a DTensor or have all 8 rows",
        ]
