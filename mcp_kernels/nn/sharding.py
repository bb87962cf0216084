"""Parameters as DTensors, and the local tensors that ops run on.

A tensor-parallel layer keeps its parameters as DTensors, so that ``clip_grad_norm_``,
``fully_shard``, optimizers and DCP see ordinary torch, and runs on their local parts, so that
no op goes through DTensor's dispatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

from mcp_kernels._transforms import are_active, innermost

Group = dist.ProcessGroup | DeviceMesh | None


class _ToLocal(torch.autograd.Function):
    """``DTensor.to_local`` of several, whose gradients are put together without DTensor's checks.

    On CPU that is 25 to 35 us for a parameter and its gradient where ``to_local`` takes 100 us.
    """

    @staticmethod
    def forward(ctx: Any, *parameters: DTensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.specs = [parameter._spec for parameter in parameters]
        locals_ = [parameter._local_tensor for parameter in parameters]
        return tuple(local.view_as(local) for local in locals_)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # Only a derivative of the gradient needs a node of its own.
        wrap = _FromLocal.apply if torch.is_grad_enabled() else _wrap
        return tuple(
            None if grad is None else wrap(grad, spec)
            for grad, spec in zip(grads, ctx.specs, strict=True)
        )  # pyright: ignore[reportReturnType]


class _ToLocalUnderTransforms(torch.autograd.Function):
    """The same as torch.func takes it, which costs more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*parameters: DTensor) -> tuple[Tensor, ...]:
        locals_ = [parameter._local_tensor for parameter in parameters]
        return tuple(local.view_as(local) for local in locals_)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[DTensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        given: list[Any] = [innermost(parameter) for parameter in inputs]
        ctx.specs = [parameter._spec for parameter in given]

    backward = _ToLocal.backward


def _wrap(local: Tensor, spec: Any) -> DTensor:
    # Without __init__, which does nothing and is slow to say so: it turns torch.compile off and on.
    return DTensor.__new__(DTensor, local.contiguous(), spec, requires_grad=False)


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, spec: Any) -> DTensor:
        return _wrap(grad, spec)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0]
        return (grad.to_local() if isinstance(grad, DTensor) else grad), None


def to_local(parameter: Tensor) -> Tensor:
    """This rank's part of a DTensor, differentiable; any other tensor as it is.

    The gradient that arrives at the part is that of the DTensor's part. Where the DTensor is
    replicated it must be the same on all ranks; ``copy_to_group`` sums parts that are not.
    """
    return to_locals([parameter])[0]


def to_locals(parameters: Sequence[Tensor]) -> list[Tensor]:
    """``to_local`` of each; those that need gradients share one step of autograd.

    Raises:
        ValueError: torch.func is asked for the gradient of a DTensor.
    """
    if torch.compiler.is_compiling():  # what the compiler can trace
        return [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    tracks = torch.is_grad_enabled()
    tracked = [p for p in parameters if tracks and isinstance(p, DTensor) and p.requires_grad]
    function = _ToLocalUnderTransforms if are_active() else _ToLocal
    if function is not _ToLocal:
        _refuse_wrapped(parameters)
    views = iter(function.apply(*tracked) if tracked else ())
    return [
        p
        if not isinstance(p, DTensor)
        else next(views)
        if tracks and p.requires_grad
        else p._local_tensor
        for p in parameters
    ]


def _refuse_wrapped(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        if not isinstance(parameter, DTensor) and isinstance(innermost(parameter), DTensor):
            raise ValueError(
                "to_local: parameters must not be DTensors that torch.func differentiates or maps, "
                "which know no transforms, got one; take their gradients by torch.autograd.grad, "
                "or give torch.func the input alone"
            )


def as_mesh(owner: str, group: Group, device_type: str | None) -> DeviceMesh | None:
    """The 1-D mesh of ``group``; None is the world, and no mesh without torch.distributed.

    Args:
        owner: named in errors.
        group: a process group of which this rank is a member, or a 1-D mesh.
        device_type: where the parameters live; None is the group's accelerator, or its CPU.

    Raises:
        ValueError: the mesh has several dims, or this rank is not a member of the group.
    """
    if isinstance(group, DeviceMesh):
        check_mesh(owner, group)
        return group
    if group is None:
        if not dist.is_available() or not dist.is_initialized():
            return None
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"{owner}: group must be a ProcessGroup this rank belongs to or a 1-D DeviceMesh, "
            f"got {group!r}"
        )
    if device_type is None:
        kinds = sorted(device.type for device in group._device_types)
        device_type = next((kind for kind in kinds if kind != "cpu"), "cpu")
    return DeviceMesh.from_group(group, device_type)


def check_mesh(owner: str, mesh: DeviceMesh) -> None:
    """Hold a mesh to one dim and to ranks that are in it.

    Raises:
        ValueError: it has more dims (names the slices), or this rank is not in it.
    """
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"{owner}: mesh must hold this rank, {dist.get_rank()}, got {mesh}; call on its ranks"
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        slices = " or ".join(f"mesh[{name!r}]" for name in names) if names else "one dim of it"
        raise ValueError(
            f"{owner}: mesh must be 1-D, got {tuple(mesh.shape)}; give it a slice: {slices}"
        )


def distribute(
    parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement, src_data_rank: int | None = 0
) -> nn.Parameter:
    """``parameter``, whole on every rank, as a DTensor parameter over a 1-D mesh.

    Args:
        parameter: the whole parameter; one on the meta device stays there.
        mesh: 1-D.
        placement: how it is laid over the mesh.
        src_data_rank: rank of the mesh whose values count; None takes each rank's own, without
            communication, and is right only where they are equal.
    """
    if mesh.device_type != parameter.device.type and not parameter.is_meta:
        raise ValueError(
            f"distribute: parameter must be on the mesh's device type, {mesh.device_type}, "
            f"got {parameter.device}; move the module first"
        )
    source = None if parameter.is_meta else src_data_rank
    value = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=source)
    return nn.Parameter(value, requires_grad=parameter.requires_grad)


def local_box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offsets, sizes) of this rank's part in the whole tensor.

    Each placement cuts what the earlier ones left, the way ``torch.chunk`` cuts. ``fully_shard``
    over a tensor-parallel parameter cuts last although its mesh dim comes first; torch marks that
    as a strided shard.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank holds no parameter of a mesh it is not in"
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    for dim, parts, index in _cuts(tensor.placements, tensor.device_mesh.shape, coordinate):
        step = -(-sizes[dim] // parts)
        start = min(index * step, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(step, sizes[dim] - start)
    return tuple(offsets), tuple(sizes)


def _cuts(
    placements: Sequence[Placement], shape: Sequence[int], coordinate: Sequence[int]
) -> list[tuple[int, int, int]]:
    """(tensor dim, number of parts, part) of each cut, in the order they are made."""
    plain, strided = [], []
    for placement, parts, index in zip(placements, shape, coordinate, strict=True):
        if isinstance(placement, _StridedShard):
            strided.append((placement.dim, parts, index))
        elif isinstance(placement, Shard):
            plain.append((placement.dim, parts, index))
    return plain + strided


@torch.no_grad()
def load_whole(parameter: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of ``whole`` into ``parameter``, a DTensor or a plain tensor."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    for dim, (start, length) in enumerate(zip(*local_box(parameter), strict=True)):
        whole = whole.narrow(dim, start, length)
    parameter.to_local().copy_(whole)


def own_parts(
    parameters: Mapping[str, Tensor | None], state_dict: Mapping[str, Any], prefix: str
) -> dict[str, Any]:
    """``state_dict`` with whole plain tensors cut to what the DTensors among ``parameters`` hold.

    Args:
        parameters: a module's own, by name.
        state_dict: may hold DTensors, which stay, and tensors of any shape.
        prefix: of the module's names in ``state_dict``.
    """
    given = dict(state_dict)
    for name, parameter in parameters.items():
        value = given.get(prefix + name)
        if not isinstance(parameter, DTensor) or parameter.is_meta:
            continue
        if not isinstance(value, Tensor) or isinstance(value, DTensor):
            continue
        if value.shape == parameter.shape:
            part = torch.empty_like(parameter, dtype=value.dtype)
            load_whole(part, value.to(parameter.device))
            given[prefix + name] = part
    return given


def broadcast_whole(whole: Tensor, mesh: DeviceMesh) -> None:
    """Give every rank of ``mesh`` the values of its first rank; collective."""
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        dist.broadcast(whole, dist.get_global_rank(group, 0), group=group)


def describe(tensor: Tensor) -> str:
    """How a parameter lies: ``whole``, ``replicated``, or what is cut where."""
    if not isinstance(tensor, DTensor):
        return "whole"
    cuts = [str(p) for p in tensor.placements if not isinstance(p, Replicate)]
    return ", ".join(cuts) or "replicated"
