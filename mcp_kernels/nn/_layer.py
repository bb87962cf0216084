"""What the tensor-parallel layers share: DTensor parameters, their values, their group.

A layer is the torch module it replaces (``nn.Linear``, ``nn.Embedding``), by inheritance: same
attributes, same names, and code that asks ``isinstance(m, nn.Linear)`` still finds it. A module
becomes a layer in place by a change of class, as ``fully_shard`` does it, so hooks, training mode
and everyone who holds the module keep it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from mcp_kernels.nn.sharding import (
    Group,
    as_mesh,
    broadcast_whole,
    describe,
    distribute,
    load_whole,
    own_parts,
)
from mcp_kernels.ops._comm import split_sizes


class TensorParallelLayer(nn.Module):
    """Mixin over a torch module whose parameters are cut over the ranks of a group."""

    PLACEMENTS: ClassVar[dict[str, Placement]]
    """How each parameter is laid over the group."""

    weight: Tensor

    def _whole_module(self, device: torch.device | None) -> nn.Module:
        """The torch module that this one stands for, freshly initialised."""
        raise NotImplementedError

    def _settle(self, group: Group, device: torch.device) -> None:
        """Give a layer made on the meta device its place and, elsewhere than there, its values."""
        kind = None if device.type == "meta" else device.type
        mesh = as_mesh(type(self).__name__, group, kind)
        if mesh is not None:
            self._distribute(mesh, None)
        if device.type != "meta":
            self.to_empty(device=device)
            self.reset_parameters()

    def _distribute(self, mesh: DeviceMesh, src_data_rank: int | None) -> None:
        for name, parameter in list(self._parameters.items()):
            if parameter is not None:
                cut = distribute(parameter, mesh, self.PLACEMENTS[name], src_data_rank)
                self.register_parameter(name, cut)

    def _take(self, module: nn.Module, group: Group, src_data_rank: int | None) -> None:
        """Take over the parameters of ``module``, which keeps its own."""
        weight = module.weight
        assert isinstance(weight, Tensor)
        if isinstance(weight, DTensor):
            raise ValueError(
                f"{type(self).__name__}: module must hold whole parameters, got a DTensor "
                f"({describe(weight)}); it is parallel already"
            )
        kind = None if weight.is_meta else weight.device.type
        mesh = as_mesh(type(self).__name__, group, kind)
        for name, parameter in module._parameters.items():
            if parameter is None:
                self.register_parameter(name, None)
            elif mesh is None:
                copied = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                self.register_parameter(name, copied)
            else:
                cut = distribute(parameter, mesh, self.PLACEMENTS[name], src_data_rank)
                self.register_parameter(name, cut)
        self.train(module.training)

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks that share the layer; None for a layer that is whole here."""
        weight = self.weight
        if not isinstance(weight, DTensor):
            return None
        # fully_shard, outside forward, adds its own mesh dim in front.
        return weight.device_mesh.get_group(weight.device_mesh.ndim - 1)

    def reset_parameters(self) -> None:
        """Draw new values: those that the whole torch module draws on the group's first rank.

        Every rank draws the whole, so that generators stay in step, and keeps its part. Does
        nothing on the meta device. Collective over the group.

        Cost: one broadcast and one transient copy of the whole parameters.
        """
        weight = self.weight
        if weight.is_meta:
            return
        whole = self._whole_module(weight.device)
        for name, values in whole.named_parameters():
            mine = self._parameters[name]
            assert mine is not None
            if isinstance(mine, DTensor):
                broadcast_whole(values.detach(), mine.device_mesh)
            load_whole(mine, values.detach())

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Take whole tensors too: each rank loads its part of them."""
        given = own_parts(self._parameters, state_dict, prefix)
        super()._load_from_state_dict(given, prefix, *args, **kwargs)

    def _ranks_repr(self) -> str:
        weight = self.weight
        if not isinstance(weight, DTensor):
            return "whole"
        ranks = weight.device_mesh.shape[-1]
        return f"ranks={ranks}, weight {describe(weight)}"


def check_whole(owner: str, weight: Tensor, rows: int) -> None:
    """Hold the weight of a layer without a group to the whole layer's ``rows``.

    Raises:
        ValueError: it is a part, whose group nobody knows (``functional_call`` with local
            tensors): what is to be summed over the ranks would not be.
    """
    if weight.shape[0] != rows:
        raise ValueError(
            f"{owner}: weight must be a DTensor or have all {rows} rows, got a plain tensor of "
            f"{list(weight.shape)}; call the layer with its own parameters or with whole ones"
        )


def check_sequence(owner: str, x: Tensor, dim: int, world: int, size: int | None) -> None:
    """Hold a whole sequence to what the next layer gathers: ``size``, or equal parts without one.

    Raises:
        ValueError: it has another length than ``size``, or is no multiple of the ranks.
    """
    if size is not None and x.shape[dim] != size:
        raise ValueError(
            f"{owner}: x must have sequence_size = {size} positions in dim {dim}, got "
            f"{x.shape[dim]}; give layers for sequences of several lengths no sequence_size"
        )
    if size is None and x.shape[dim] % world:
        raise ValueError(
            f"{owner}: x must have a multiple of {world} positions in dim {dim} with "
            f"sequence_parallel, got {x.shape[dim]}; give every layer sequence_size="
            f"{x.shape[dim]}, pad the sequence or turn it off"
        )


def check_parts(owner: str, x: Tensor, dim: int, group: ProcessGroup, size: int | None) -> None:
    """Hold the ranks' parts of a sequence against each other, and against ``size``. Collective.

    A part that does not fit would leave its peers in a gather that cannot end, so all ranks hear of
    it. For the first call of a layer: later ones must not cost an exchange.

    Raises:
        ValueError: on every rank, where one brings another length than it should.
    """
    mine = torch.tensor([x.shape[dim]], device=x.device)
    told = mine.new_empty(group.size())
    group._allgather_base(told, mine).wait()
    lengths = told.tolist()
    if size is None and len(set(lengths)) > 1:
        raise ValueError(
            f"{owner}: x must have equally many positions in dim {dim} on every rank with "
            f"sequence_parallel, got {lengths}; cut as torch.chunk does and give every layer "
            "sequence_size, or pad the sequence"
        )
    expected = None if size is None else split_sizes(size, group.size())
    if expected is not None and lengths != expected:
        raise ValueError(
            f"{owner}: x must have this rank's part of sequence_size = {size} in dim {dim}, "
            f"{expected} positions by rank, got {lengths}; cut as torch.chunk does"
        )
