"""A module whose parameters are whole on every rank of a tensor-parallel group, as DTensors.

torch's ``clip_grad_norm_`` and foreach optimizers take DTensors of one mesh and nothing beside
them, so norms and other whole parameters become replicated DTensors; the module's own forward runs
on their local tensors, without DTensor's dispatch.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from mcp_kernels.nn.sharding import distribute, own_parts, to_local
from mcp_kernels.ops.collectives import copy_to_group


class ReplicatedModule(nn.Module):
    """Mixin that ``replicate`` puts in front of a module's class."""

    sums_gradients: bool
    """Each rank's gradient is a part (of the sequence, of the heads): backward sums them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, with plain local tensors in place of its parameters."""
        held = self._parameters
        local = {name: None if p is None else self._local(p) for name, p in held.items()}
        self.__dict__["_parameters"] = local
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.__dict__["_parameters"] = held

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        given = own_parts(self._parameters, state_dict, prefix)
        super()._load_from_state_dict(given, prefix, *args, **kwargs)

    def _local(self, parameter: Tensor) -> Any:
        local = to_local(parameter)
        if not self.sums_gradients or not isinstance(parameter, DTensor):
            return local
        return copy_to_group(local, group=parameter.device_mesh.get_group())


@functools.cache
def _replicated_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"Replicated{cls.__name__}", (ReplicatedModule, cls), {"__doc__": cls.__doc__})


def replicate(
    module: nn.Module, mesh: DeviceMesh, *, sums_gradients: bool, src_data_rank: int | None
) -> None:
    """Make the parameters of ``module`` itself (not of its children) replicated DTensors, in place.

    Args:
        module: any module that reads its parameters in its own forward.
        mesh: 1-D.
        sums_gradients: whether ranks find parts of the gradient, to be summed in backward.
        src_data_rank: as in ``distribute``.
    """
    for name, parameter in list(module._parameters.items()):
        if parameter is not None:
            whole = distribute(parameter, mesh, Replicate(), src_data_rank)
            module.register_parameter(name, whole)
    module.__class__ = _replicated_class(type(module))
    assert isinstance(module, ReplicatedModule)
    module.sums_gradients = sums_gradients
