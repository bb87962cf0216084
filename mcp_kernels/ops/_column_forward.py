"""Bodies of ``all_gather_matmul``: its reference, the one in pieces, the one in shared memory.

x = all-gather of x_r along gather_dim; or replicated
y_i = x @ weight_i.T + bias_i
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcp_kernels.ops import _comm, _fused, _overlap, _overlap_group
from mcp_kernels.ops._linear import linear

SCHEMA = (
    "all_gather_matmul(Tensor x, Tensor[] weights, Tensor[] biases, str group, int? gather_dim,"
    " SymInt? gather_size, bool save_gathered) -> (Tensor[] ys, Tensor gathered)"
)


def gathered_shape(x: Tensor, dim: int | None, size: int | None, group: str) -> list[int]:
    """Shape of the gathered ``x``."""
    return list(x.shape) if dim is None else _comm.gathered_shape(x, dim, size, group)


def reference(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    group: str,
    gather_dim: int | None,
    gather_size: int | None,
    save_gathered: bool,
) -> tuple[list[Tensor], Tensor]:
    """The ys, and the gathered ``x`` where backward wants it; else an empty tensor."""
    pg = None if gather_dim is None else _comm.resolve(group)
    if pg is None or gather_dim is None:
        gathered = x
    else:
        gathered = _comm.gather(x, pg, gather_dim, gather_size)
    given = biases or [None] * len(weights)
    ys = [linear(gathered, weight, bias) for weight, bias in zip(weights, given, strict=True)]
    # An op must not return its input, so where x is all there is, nothing is returned.
    return ys, gathered if save_gathered and pg is not None else x.new_empty(0)


def overlapped(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    group: str,
    gather_dim: int | None,
    gather_size: int | None,
    save_gathered: bool,
) -> tuple[list[Tensor], Tensor]:
    """Rows are multiplied as they arrive, this rank's own before all."""
    assert gather_dim is not None
    shape = _comm.gathered_shape(x, gather_dim, gather_size, group)
    ys = [x.new_empty(*shape[:-1], weight.shape[0]) for weight in weights]
    multiply = _overlap.multiply_rows(ys, weights, biases)
    gathered = _overlap.Gather(x, _overlap_group.carrier(x, group), gather_dim).join(multiply)
    return ys, gathered if save_gathered else x.new_empty(0)


def why_not_overlapped(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    group: str,
    gather_dim: int | None,
    gather_size: int | None,
    save_gathered: bool,
) -> str | None:
    """Why the gather does not run under the products."""
    return _overlap.why_not_gather(x, group, gather_dim, gather_size)


def on_shm(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    group: str,
    gather_dim: int | None,
    gather_size: int | None,
    save_gathered: bool,
) -> tuple[list[Tensor], Tensor]:
    """Each rank's rows go into shared memory and are multiplied where, and when, they arrive."""
    args = (x, weights, biases, group, gather_dim, gather_size, save_gathered)
    if gather_dim is None:
        return reference(*args)
    shape = _comm.gathered_shape(x, gather_dim, gather_size, group)
    space = _fused.workspace(group, torch.Size(shape).numel() * x.element_size())
    if space is None:
        return reference(*args)
    ys = [x.new_empty(*shape[:-1], weight.shape[0]) for weight in weights]
    multiply = _overlap.multiply_rows(ys, weights, biases)
    local = x.shape[gather_dim]
    if gather_size is None:
        sizes = [local] * space.world
    else:
        sizes = _comm.split_sizes(gather_size, space.world)
    gathered = _fused.gather_rows(space, "all_gather_matmul", x, gather_dim, sizes, multiply)
    return ys, gathered if save_gathered else x.new_empty(0)


def refuses(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    group: str,
    gather_dim: int | None,
    gather_size: int | None,
    save_gathered: bool,
) -> str | None:
    """Why shared memory cannot carry x."""
    shape = gathered_shape(x, gather_dim, gather_size, group)
    return _fused.why_not(x, group, torch.Size(shape).numel() * x.element_size())


def fake(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    group: str,
    gather_dim: int | None,
    gather_size: int | None,
    save_gathered: bool,
) -> tuple[list[Tensor], Tensor]:
    """Shapes alone."""
    shape = gathered_shape(x, gather_dim, gather_size, group)
    ys = [x.new_empty(*shape[:-1], weight.shape[0]) for weight in weights]
    return ys, x.new_empty(shape if save_gathered and group and gather_dim is not None else 0)
