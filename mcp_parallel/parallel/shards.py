"""Where each parameter of this rank lies in the whole, and which rank counts it.

Tensor parallelism and ``fully_shard`` both leave DTensors, whose placements say what this rank
holds. Everything that must see each element once (clipping, checkpoints, parity) asks these
records, which read it from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from mcp_kernels.nn import RowParallelLinear
from mcp_kernels.nn.sharding import local_box
from mcp_parallel.layout import Layout
from mcp_parallel.model.stage import stable_name
from mcp_parallel.parallel.mesh import Mesh


@dataclass(frozen=True)
class Shard:
    """One parameter on this rank."""

    name: str
    parameter: nn.Parameter
    counted_here: bool
    """False on ranks that hold a replica which another rank counts."""
    grad_partial_over_tp: bool
    """True when each tp rank's gradient covers its own part of the sequence only."""
    master: Tensor | None = None
    """The local fp32 values that a 16-bit parameter is rounded from, with the sum of its gradients
    as ``grad``; None where the parameter itself is what the optimizer moves."""

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return tuple(self.parameter.shape)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Global index of the local part's first element."""
        parameter = self.parameter
        return local_box(parameter)[0] if isinstance(parameter, DTensor) else (0,) * parameter.dim()

    @property
    def local(self) -> Tensor:
        """The local values that training moves: the master, or the parameter's outside autograd."""
        return local_part(self.parameter.detach()) if self.master is None else self.master

    @property
    def local_grad(self) -> Tensor | None:
        """The local gradient after backward, of ``local``'s dtype, or None."""
        grad = self.parameter.grad if self.master is None else self.master.grad
        return None if grad is None else local_part(grad)


def local_part(tensor: Tensor) -> Tensor:
    """The plain tensor behind a DTensor that needs no gradient; any other tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def publish(shards: Sequence[Shard]) -> None:
    """Round masters into the parameters that the model computes with, after they were moved."""
    kept = [(shard.parameter, shard.master) for shard in shards if shard.master is not None]
    if kept:
        targets = [local_part(parameter.detach()) for parameter, _ in kept]
        torch._foreach_copy_(targets, [master for _, master in kept])


def like_parameter(parameter: nn.Parameter, local: Tensor) -> Tensor:
    """``local`` as a value or gradient of ``parameter``: a DTensor like it where it is one."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def is_sharded(layout: Layout) -> bool:
    """Whether ``fully_shard`` splits parameters over dp and cp; one rank has nothing to split."""
    return layout.zero > 0 and layout.zero_ranks > 1


def iter_shards(
    model: nn.Module, mesh: Mesh, masters: Mapping[nn.Parameter, Tensor], *, is_tied_copy: bool
) -> Iterator[Shard]:
    """A record for each parameter of ``model``, after it was parallelised.

    Args:
        model: this rank's stage.
        mesh: the rank's mesh.
        masters: fp32 values of 16-bit parameters.
        is_tied_copy: the stage holds the second copy of a tied embedding, counted on the first
            stage.
    """
    place = mesh.places()
    summed = {
        parameter
        for module in model.modules()
        if isinstance(module, RowParallelLinear)  # sums its bias's gradient in its own backward
        for parameter in module.parameters()
    }
    for full_name, parameter in model.named_parameters():
        name = stable_name(full_name)
        cut = _axes_cut(parameter)
        is_first_replica = all(index == 0 for axis, index in place.items() if axis not in cut)
        yield Shard(
            name=name,
            parameter=parameter,
            counted_here=is_first_replica and not (is_tied_copy and name == "embed"),
            grad_partial_over_tp="tp" not in cut
            and parameter not in summed
            and mesh.layout.tp > 1
            and mesh.layout.sequence_parallel,
            master=masters.get(parameter),
        )


def _axes_cut(parameter: nn.Parameter) -> set[str]:
    """Names of the mesh axes over which ranks hold different parts of a parameter."""
    if not isinstance(parameter, DTensor):
        return set()
    names = parameter.device_mesh.mesh_dim_names
    assert names is not None, "the trainer's meshes are slices of its named one"
    pairs = zip(names, parameter.placements, strict=True)
    return {name for name, placement in pairs if not isinstance(placement, Replicate)}
