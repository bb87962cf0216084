"""The tensor-parallel matmuls on any group whose collectives run by themselves: gloo, NCCL.

A product that is to be summed is computed in pieces; while a piece is under way between the ranks
the next is computed. An input that is to be gathered is sent first, in pieces; meanwhile a rank
multiplies its own rows, then its peers' as they arrive. On CUDA the collectives run on the
backend's own stream and all waits are between streams.

Results are those of the references but for the order of a sum: of a matmul's terms, which depends
on its shape, and of the ranks', which depends on the place in the buffer above two ranks. All
ranks hold the same bits where the backend's collectives give them.

Letters: M = rows, K = in features, N = out features, W = ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mcp_kernels.ops import _comm
from mcp_kernels.ops._comm import Carrier
from mcp_kernels.ops._linear import as_rows
from mcp_kernels.ops._overlap_cut import Cut, cut_gather, cut_product
from mcp_kernels.ops._overlap_group import why_not

TOO_SMALL = "needs at least two pieces of 1 MiB and 512 rows or columns"


def why_not_product(x: Tensor, columns: int, group: str) -> str | None:
    """Why the sum of ``x [..., K]`` times ``columns`` features stays in one piece."""
    rows = x.shape[:-1].numel()
    if cut_product(rows, columns, rows * columns * x.element_size()) is None:
        return TOO_SMALL
    return why_not(x, group)


def sum_of_product(x: Tensor, weight: Tensor, bias: Tensor | None, carrier: Carrier) -> Tensor:
    """The ranks' summed ``x @ weight.T``; ``bias`` is of one rank."""
    rows, columns = as_rows(x), weight.shape[0]
    cut = cut_product(rows.shape[0], columns, rows.shape[0] * columns * x.element_size())
    assert cut is not None
    out = x.new_empty(rows.shape[0], columns)
    finishes: list[Callable[[], object]] = []
    for first, count in cut.steps:
        if cut.by_rows:
            target = _product(rows[first : first + count], weight, bias, out[first : first + count])
            finishes.append(carrier.start_sum_(target))
            continue
        piece = _columns(rows, weight, bias, first, count)
        finish = carrier.start_sum_(piece)
        finishes.append(_then_copy(finish, out[:, first : first + count]))
    for finish in finishes:
        finish()
    return torch.ops.aten._unsafe_view(out, [*x.shape[:-1], columns])


def why_not_scatter(x: Tensor, columns: int, group: str, dim: int) -> str | None:
    """Why the scattered sum of a product stays in one piece."""
    _, world = _comm.place(group)
    if dim >= x.dim() - 1 or x.shape[dim] % world:
        return "needs rows to scatter, as many to every rank"
    if _cut_scatter(x, columns, world) is None:
        return TOO_SMALL
    return why_not(x, group)


def scatter_of_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, carrier: Carrier, dim: int
) -> Tensor:
    """This rank's part along ``dim`` of the ranks' summed product; ``bias`` is of one rank."""
    world, columns = carrier.world, weight.shape[0]
    cut = _cut_scatter(x, columns, world)
    assert cut is not None
    packed = _comm.pack_by_rank(x, dim, world)  # where rows are narrower than their product
    # [W, M / W, K]; K may be 0 on a rank, which then adds nothing to the sum.
    rows = packed.view(world, x.shape[:-1].numel() // world, x.shape[-1])
    out = x.new_empty(rows.shape[1], columns)
    finishes: list[Callable[[], object]] = []
    for first, count in cut.steps:
        if cut.by_rows:
            piece = x.new_empty(world, count, columns)
            for peer in range(world):
                _product(rows[peer, first : first + count], weight, bias, piece[peer])
            target = out[first : first + count]
        else:
            piece = _columns(rows.flatten(0, 1), weight, bias, first, count)
            piece = piece.view(world, -1, count)
            target = out[:, first : first + count]
        finishes.append(_then_copy(carrier.start_scatter(piece), target))
    for finish in finishes:
        finish()
    return torch.ops.aten._unsafe_view(out, [*packed.shape[1:-1], columns])


def _cut_scatter(x: Tensor, columns: int, world: int) -> Cut | None:
    rows = x.shape[:-1].numel()
    return cut_product(rows // world, columns, rows * columns * x.element_size())


def why_not_gather(x: Tensor, group: str, dim: int | None, size: int | None) -> str | None:
    """Why the gather of ``x`` does not run under a product."""
    _, world = _comm.place(group)
    if dim is None or dim >= x.dim() - 1 or (size is not None and size % world):
        return "needs rows to gather, as many from every rank"
    if cut_gather(x.shape, dim, x.element_size()) is None:
        return "needs parts of at least 1 MiB and 512 rows"
    return why_not(x, group)


Take = Callable[[Tensor, int, int], None]


class Gather:
    """A gather under way: started by the constructor, taken part by part.

    Args:
        x: this rank's part; every rank's is as large.
        carrier: of the ranks.
        dim: not the last.
    """

    def __init__(self, x: Tensor, carrier: Carrier, dim: int) -> None:
        self._x = x
        self._rank, self._world, self._dim = carrier.rank, carrier.world, dim
        steps = cut_gather(x.shape, dim, x.element_size())
        assert steps is not None
        self._pending = [
            (first, carrier.start_gather(x.narrow(dim, first, count).contiguous()))
            for first, count in steps
        ]

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """``(place along dim, rows)``: this rank's own first, the others' as they arrive."""
        part = self._x.shape[self._dim]
        yield self._rank * part, self._x
        for first, finish in self._pending:
            parts = finish()
            for distance in range(1, self._world):
                peer = (self._rank + distance) % self._world
                yield peer * part + first, parts[peer]

    def join(self, each: Take) -> Tensor:
        """All parts joined, contiguous; ``each(rows, first, last)`` gets them as they come.

        ``rows`` is the joined tensor as ``[M, K]``; rows first to last of it have arrived.
        """
        x, dim = self._x, self._dim
        shape = [*x.shape[:dim], self._world * x.shape[dim], *x.shape[dim + 1 :]]
        joined = x.new_empty(shape)
        rows = joined.view(-1, shape[-1])
        inner = torch.Size(shape[dim + 1 : -1]).numel()
        for place, part in self.parts():
            joined.narrow(dim, place, part.shape[dim]).copy_(part)
            for outer in range(torch.Size(shape[:dim]).numel()):
                first = (outer * shape[dim] + place) * inner
                each(rows, first, first + part.shape[dim] * inner)
        return joined


def multiply_rows(
    ys: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> Take:
    """What multiplies arrived rows by ``weights`` transposed, into their rows of ``ys``."""

    def take(rows: Tensor, first: int, last: int) -> None:
        for number, (y, weight) in enumerate(zip(ys, weights, strict=True)):
            into = y.view(rows.shape[0], weight.shape[0])[first:last]
            _product(rows[first:last], weight, biases[number] if biases else None, into)

    return take


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    if bias is None:
        return torch.mm(rows, weight.t(), out=out)
    return torch.addmm(bias, rows, weight.t(), out=out)


def _columns(rows: Tensor, weight: Tensor, bias: Tensor | None, first: int, count: int) -> Tensor:
    part = weight[first : first + count]
    own = None if bias is None else bias[first : first + count]
    return _product(rows, part, own, rows.new_empty(rows.shape[0], count))


def _then_copy(finish: _comm.Finish, target: Tensor) -> Callable[[], object]:
    return lambda: target.copy_(finish())
