"""Where each parameter of this rank lies in the whole, and which rank counts it.

A rank holds a rectangle of each parameter: tensor parallelism cuts one dim, ``fully_shard`` cuts
the rows of what is left. Everything that must see each element once (clipping, checkpoints,
parity) asks these records and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mcp_parallel.layout import Layout, split_dim
from mcp_parallel.parallel.mesh import Mesh
from mcp_parallel.parallel.tensor import split_dim_of


@dataclass(frozen=True)
class Shard:
    """One parameter on this rank."""

    name: str
    parameter: nn.Parameter
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Global index of the local part's first element."""
    counted_here: bool
    """False on ranks that hold a replica which another rank counts."""
    grad_partial_over_tp: bool
    """True when each tp rank's gradient covers its own part of the sequence only."""

    @property
    def local(self) -> Tensor:
        """The local values, sharing memory with the parameter, outside autograd."""
        return local_part(self.parameter.detach())

    @property
    def local_grad(self) -> Tensor | None:
        """The local gradient after backward, or None."""
        grad = self.parameter.grad
        return None if grad is None else local_part(grad)


def local_part(tensor: Tensor) -> Tensor:
    """The plain tensor behind a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_sharded(layout: Layout) -> bool:
    """Whether ``fully_shard`` splits parameters over dp; with one replica there is nothing to."""
    return layout.zero > 0 and layout.dp > 1


def tensor_rectangle(
    name: str, global_shape: tuple[int, ...], tp: int, tp_index: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offsets, sizes) of tensor-parallel rank ``tp_index``'s part of a parameter."""
    offsets, sizes = [0] * len(global_shape), list(global_shape)
    dim = split_dim_of(name)
    if dim is not None:
        offsets[dim], sizes[dim] = split_dim(global_shape[dim], tp, tp_index)
    return tuple(offsets), tuple(sizes)


def iter_shards(
    model: nn.Module,
    global_shapes: dict[str, tuple[int, ...]],
    mesh: Mesh,
    *,
    is_tied_copy: bool,
) -> Iterator[Shard]:
    """A record for each parameter of ``model``, after it was parallelised.

    Args:
        model: this rank's stage.
        global_shapes: whole shape of each parameter by name.
        mesh: the rank's mesh.
        is_tied_copy: the stage holds the second copy of a tied embedding, counted on the first
            stage.
    """
    layout, place = mesh.layout, mesh.coordinate
    for name, parameter in model.named_parameters():
        offsets, sizes = tensor_rectangle(name, global_shapes[name], layout.tp, place.tp)
        if is_sharded(layout):
            # fully_shard cuts dim 0 of the tensor-parallel part the way torch.chunk does.
            start, _ = split_dim(sizes[0], layout.dp, place.dp)
            offsets = (offsets[0] + start, *offsets[1:])
        replicated_over_tp = split_dim_of(name) is None
        yield Shard(
            name=name,
            parameter=parameter,
            global_shape=global_shapes[name],
            offsets=offsets,
            counted_here=(is_sharded(layout) or place.dp == 0)
            and (not replicated_over_tp or place.tp == 0)
            and not (is_tied_copy and name == "embed"),
            grad_partial_over_tp=replicated_over_tp and layout.tp > 1 and layout.sequence_parallel,
        )


def empty_parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    """A parameter without memory, to be given values later."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
