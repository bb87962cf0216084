"""The table of transforms in docs/kernels.md: what each cell says is so.

A derivative that the table calls right is held to plain PyTorch's in float64. Both are the same
sums in an order of their own: of fewer than 100 terms, nested at most six deep in a second
derivative, each term at most eight times the largest result, so off by that many roundings.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap
from transform_cases import Case, cases

import mcp_kernels
from mcp_kernels import nn

ROUNDINGS = 100 * 6 * 8
DOC = Path(__file__).resolve().parent.parent / "docs" / "kernels.md"
# What no tensor goes through, and what is not called in a graph.
NOT_OPS = {"build_info", "onebit_buffers", "reference_only", "which_backend"}
LAYERS = {
    *("ColumnParallelLinear", "FlashAttention", "RowParallelLinear", "SplitLinear"),
    "VocabParallelEmbedding",
}
SAMPLES = 2


def read_table() -> dict[str, list[str]]:
    """The cells after each op's name."""
    section = DOC.read_text(encoding="utf-8").split("## Under torch.func")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return {
        name.strip(" `"): [cell.strip() for cell in cells]
        for names, *cells in rows
        for name in names.split(",")
    }


TABLE = read_table()


def test_the_table_names_every_op_and_layer() -> None:
    public = {
        name
        for name in mcp_kernels.__all__
        if inspect.isfunction(getattr(mcp_kernels, name)) and not name.startswith("build")
    }
    assert set(TABLE) == (public - NOT_OPS) | LAYERS
    assert set(TABLE) == set(cases())
    assert all(hasattr(nn, name) for name in LAYERS)
    assert {len(cells) for cells in TABLE.values()} == {6}


def loss_of(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: call(*args).square().sum()


def slope_of(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss of a gradient, whose gradient is a second derivative."""
    return lambda *args: grad(loss_of(call))(*args).square().sum()


def stacked(case: Case) -> tuple[list[Tensor], tuple[int | None, ...]]:
    """Samples of x and of what is mapped with it, and the dimensions to map."""
    x, *rest = case.make(case.length)
    scales = torch.arange(1, SAMPLES + 1, dtype=x.dtype)
    maps = case.maps or (False,) * len(rest)
    args = [torch.stack([x * scale for scale in scales])]
    args += [
        torch.stack([t] * SAMPLES) if is_mapped else t
        for t, is_mapped in zip(rest, maps, strict=False)
    ]
    args += rest[len(maps) :]
    dims = [0, *(0 if is_mapped else None for is_mapped in maps)]
    return args, (*dims, *[None] * (len(args) - len(dims)))


def by_hand(function: Callable[..., Tensor], case: Case) -> Tensor:
    """What mapping over the samples must give: one after the other."""
    args, dims = stacked(case)
    return torch.stack(
        [
            function(*(a if d is None else a[i].clone() for a, d in zip(args, dims, strict=True)))
            for i in range(SAMPLES)
        ]
    )


def assert_as_exact(got: Tensor, wanted: Tensor) -> None:
    scale = max(1.0, wanted.abs().max().item())
    error = (got - wanted).abs().max().item()
    assert error <= ROUNDINGS * torch.finfo(torch.float64).eps * scale, f"off by {error}"


def hold(cell: str, got: Callable[[], Tensor], exact: Callable[[], Tensor]) -> None:
    """One cell: ``got`` is ``exact``'s result, zeros, or an error in the words of this package."""
    if cell == "yes":
        assert_as_exact(got(), exact())
    elif cell == "constant":
        assert not got().any()
    else:
        assert cell == "refused", cell
        with pytest.raises((ValueError, RuntimeError)) as raised:
            got()
        owner, _, words = str(raised.value).partition(": ")
        assert owner.removesuffix("_func") in {*mcp_kernels.__all__, "flash_attn_kvcache"}, owner
        assert " must " in words or "has no backward" in words


@pytest.mark.parametrize("name", TABLE)
def test_derivatives_and_maps(name: str) -> None:
    case, (first, mapped, mapped_grad, second, *_) = cases()[name], TABLE[name]
    call, exact = case.call, case.exact
    if exact is None:
        exact = call  # for the map, whose samples are then the op's own

    def check(cell: str, transform: Callable[..., Callable[..., Tensor]], dims: bool) -> None:
        def run(function: Callable[..., Tensor]) -> Tensor:
            if not dims:
                return transform(function)(*case.make(case.length))
            args, in_dims = stacked(case)
            return vmap(transform(function), in_dims)(*args)

        wanted = (lambda: by_hand(transform(exact), case)) if dims else (lambda: run(exact))
        hold(cell, lambda: run(call), wanted)

    check(first, lambda f: grad(loss_of(f)), False)
    check(first, lambda f: grad(lambda *args: (f(*args) * 0.5).sum()), False)
    check(first, jacrev, False)
    check(mapped, lambda f: f, True)
    check(mapped_grad, lambda f: grad(loss_of(f)), True)
    check(second, lambda f: grad(slope_of(f)), False)
    if second == "yes":
        check(mapped_grad, lambda f: grad(slope_of(f)), True)
