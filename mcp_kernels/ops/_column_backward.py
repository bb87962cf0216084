"""Gradients of ``all_gather_matmul`` for its input and its weights, communication under matmuls.

    dx = sum over ranks of sum_i dy_i @ weight_i, this rank's part along dim; all of it without dim
    dweight_i = dy_i.T @ x

The sum over ranks starts before the dweights are computed and is finished after them. Where x is
gathered anew, its parts travel while dx is computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcp_kernels.ops import _comm, _fused
from mcp_kernels.ops._deferred import WeightGradients
from mcp_kernels.ops._linear import as_rows

SCHEMA = (
    "all_gather_matmul_backward(Tensor[] dys, Tensor[] weights, Tensor x, bool[] needs, str group,"
    " int? gather_dim, SymInt? gather_size, bool is_gathered) -> (Tensor dx, Tensor[] dweights)"
)


def reference(
    dys: list[Tensor],
    weights: list[Tensor],
    x: Tensor,
    needs: list[bool],
    group: str,
    gather_dim: int | None,
    gather_size: int | None,
    is_gathered: bool,
) -> tuple[Tensor, list[Tensor]]:
    """``needs`` is for dx and each dweight; what is not needed comes back empty."""
    pg = _comm.resolve(group)
    carrier = None if pg is None else _comm.GroupCarrier(pg)
    return carried(dys, weights, x, needs, carrier, gather_dim, gather_size, is_gathered)


def carried(
    dys: list[Tensor],
    weights: list[Tensor],
    x: Tensor,
    needs: list[bool],
    carrier: _comm.Carrier | None,
    gather_dim: int | None,
    gather_size: int | None,
    is_gathered: bool,
) -> tuple[Tensor, list[Tensor]]:
    """The formulas, by the collectives of ``carrier``; None is one rank."""
    needs_dx, *needs_dw = needs
    finish = arrive = None
    if carrier is not None and gather_dim is not None and not is_gathered and any(needs_dw):
        arrive = _comm.start_gather(x, carrier, gather_dim, gather_size)
    if needs_dx:
        dx = torch.mm(as_rows(dys[0]), weights[0])
        for dy, weight in zip(dys[1:], weights[1:], strict=True):
            dx.addmm_(as_rows(dy), weight)
        dx = dx.view(*dys[0].shape[:-1], dx.shape[-1])
        if carrier is not None and gather_dim is not None:
            finish = _comm.start_scatter_sum(dx, carrier, gather_dim)
        elif carrier is not None:
            finish = carrier.start_sum_(dx)
        else:
            finish = dx.clone
    if arrive is not None:
        x = arrive()
    dws = _weight_gradients(dys, x, needs_dw)
    return x.new_empty(0) if finish is None else finish(), dws


def on_shm(
    dys: list[Tensor],
    weights: list[Tensor],
    x: Tensor,
    needs: list[bool],
    group: str,
    gather_dim: int | None,
    gather_size: int | None,
    is_gathered: bool,
) -> tuple[Tensor, list[Tensor]]:
    """As ``reference``; dx is computed straight into the group's memory."""
    needs_dx, *needs_dw = needs
    shape = [*dys[0].shape[:-1], weights[0].shape[1]]
    num_bytes = torch.Size(shape).numel() * x.element_size()
    space = _fused.workspace(group, num_bytes) if num_bytes else None
    if space is None:
        args = (dys, weights, x, needs, group, gather_dim, gather_size, is_gathered)
        return reference(*args)
    name = "all_gather_matmul"
    pairs = [(as_rows(dy), weight) for dy, weight in zip(dys, weights, strict=True)]
    has_first = False
    if gather_dim is not None and not is_gathered and any(needs_dw):
        sizes = [x.shape[gather_dim]] * space.world
        if gather_size is not None:
            sizes = _comm.split_sizes(gather_size, space.world)
        has_first = needs_dx  # its first block, while the others' parts of x come

        def compute_first(slot: int) -> None:
            _fused.compute_first(space, slot, pairs)

        meanwhile = compute_first if has_first else None
        x = _fused.gather_rows(space, name, x, gather_dim, sizes, _nothing, meanwhile)
    dws: list[Tensor] = []
    if not needs_dx:
        return x.new_empty(0), _weight_gradients(dys, x, needs_dw)
    region = None
    if gather_dim is not None:
        region = _fused.part_along(shape, gather_dim, space.rank, space.world)
        shape[gather_dim] = _comm.split_sizes(shape[gather_dim], space.world)[space.rank]
    dx = x.new_empty(shape)
    _fused.sum_of_products(
        space,
        name,
        pairs,
        region,
        dx,
        meanwhile=lambda: dws.extend(_weight_gradients(dys, x, needs_dw)),
        has_first=has_first,
    )
    return dx, dws


def refuses(
    dys: list[Tensor],
    weights: list[Tensor],
    x: Tensor,
    needs: list[bool],
    group: str,
    gather_dim: int | None,
    gather_size: int | None,
    is_gathered: bool,
) -> str | None:
    """Why shared memory cannot carry dx."""
    return _fused.why_not(x, group, _fused.num_bytes(dys[0], weights[0].shape[1]))


def fake(
    dys: list[Tensor],
    weights: list[Tensor],
    x: Tensor,
    needs: list[bool],
    group: str,
    gather_dim: int | None,
    gather_size: int | None,
    is_gathered: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Shapes alone."""
    needs_dx, *needs_dw = needs
    shape = [*dys[0].shape[:-1], weights[0].shape[1]]
    if gather_dim is not None:
        shape = _comm.scattered_shape(shape, gather_dim, group)
    dws = [
        x.new_empty(weight.shape if need else 0)
        for weight, need in zip(weights, needs_dw, strict=True)
    ]
    return x.new_empty(shape if needs_dx else 0), dws


def defer(
    ctx: Any, later: WeightGradients, x: Tensor, pairs: list[tuple[int, Tensor, Tensor]]
) -> None:
    """Leave the products for the weights of ``pairs`` (place, dy, weight) to ``later``."""
    group, dim, size = ctx.group, ctx.dim, ctx.size
    is_part = bool(group) and dim is not None and not ctx.is_gathered

    def compute() -> list[Tensor]:
        whole = torch.ops.mcp_kernels.all_gather(x, group, dim, size) if is_part else x
        return [torch.mm(as_rows(dy).t(), as_rows(whole)) for _, dy, _ in pairs]

    later.add([ctx.weights[place] for place, _, _ in pairs], compute)


def _weight_gradients(dys: list[Tensor], x: Tensor, needs: list[bool]) -> list[Tensor]:
    rows = as_rows(x) if any(needs) else x
    return [
        torch.mm(as_rows(dy).t(), rows) if need else dy.new_empty(0)
        for dy, need in zip(dys, needs, strict=True)
    ]


def _nothing(rows: Tensor, begin: int, end: int) -> None:
    """Nothing is multiplied by what is only gathered."""
