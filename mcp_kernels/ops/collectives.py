"""Differentiable collectives: all_reduce, reduce_scatter, all_gather, copy_to_group.

One convention for every backward in this package: **the ranks of a group together compute one
loss, and a value that is the same on all ranks (replicated) counts once**. The gradient of a
replicated value is then itself replicated, and the gradient of a value that each rank uses in its
own way is the sum of what the ranks found. So

    op               forward                       backward
    all_reduce       partial    -> replicated      identity (copy_to_group, differentiated again)
    reduce_scatter   partial    -> sharded         all_gather
    all_gather       sharded    -> used by each    reduce_scatter (sum of partial gradients)
    copy_to_group    replicated -> used by each    all_reduce     (sum of partial gradients)

Source: Shoeybi et al., "Megatron-LM" (2019), operators f and g; Korthikanti et al., "Reducing
activation recomputation" (2022), their sequence-parallel forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcp_kernels._op import define_op
from mcp_kernels._transforms import Result, are_active, in_front, refuse_jvp
from mcp_kernels.ops import _comm, _fused


def all_reduce(x: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Sum of ``x`` over the ranks of ``group``, on every rank.

    Args:
        x: any shape and strides, the same shape on every rank; unchanged.
        group: None is the world, or this process alone where torch.distributed is not set up.

    Returns:
        A new contiguous tensor of x's dtype, the same bits on every rank.

    Cost: one all-reduce of ``x``; nothing in backward.
    """
    local = _fused.direct_group(group, x, x, None)
    if local is not None and x.is_contiguous():
        return local.sum_of(x)
    return torch.ops.mcp_kernels.all_reduce(x, _comm.group_name(group))


def reduce_scatter(x: Tensor, *, group: ProcessGroup | None = None, scatter_dim: int = 0) -> Tensor:
    """This rank's part, along ``scatter_dim``, of the sum of ``x`` over the ranks.

    Args:
        x: any shape and strides, the same shape on every rank; unchanged.
        group: None is the world, or this process alone where torch.distributed is not set up.
        scatter_dim: cut as ``torch.chunk`` cuts, so the last ranks may get less or nothing.

    Returns:
        A new contiguous tensor of x's dtype.

    Raises:
        ValueError: ``scatter_dim`` is out of range.

    Cost: one reduce-scatter; one copy of ``x`` where ``scatter_dim`` is not its first dimension
    above size 1. Backward: one all-gather.
    """
    dim = _comm.normalize_dim("reduce_scatter", "scatter_dim", scatter_dim, x.dim())
    return torch.ops.mcp_kernels.reduce_scatter(x, _comm.group_name(group), dim)


def all_gather(
    x: Tensor,
    *,
    group: ProcessGroup | None = None,
    gather_dim: int = 0,
    gather_size: int | None = None,
) -> Tensor:
    """The ranks' parts joined along ``gather_dim``, on every rank.

    Args:
        x: this rank's part, any strides; unchanged.
        group: None is the world, or this process alone where torch.distributed is not set up.
        gather_dim: the dimension that is joined.
        gather_size: joined size; needed where the parts differ in size, and then each rank's part
            must be what ``torch.chunk`` of that size gives it. None promises equal parts.

    Returns:
        A new contiguous tensor of x's dtype.

    Raises:
        ValueError: ``gather_dim`` is out of range, or the part does not fit ``gather_size``.

    Cost: one all-gather; one copy of the result where ``gather_dim`` is not its first dimension
    above size 1. Backward: one reduce-scatter.
    """
    dim = _comm.normalize_dim("all_gather", "gather_dim", gather_dim, x.dim())
    name = _comm.group_name(group)
    _comm.check_gather_size("all_gather", x, dim, gather_size, name)
    return torch.ops.mcp_kernels.all_gather(x, name, dim, gather_size)


def copy_to_group(x: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """``x`` itself; in backward, the sum over ranks of the gradients it received.

    The entry of a column-parallel region whose input every rank holds in full.

    Args:
        x: replicated input.
        group: None is the world, or this process alone where torch.distributed is not set up.

    Returns:
        A view of ``x``.

    Cost: nothing in forward; one all-reduce in backward.
    """
    name = _comm.group_name(group)
    return _copy(x, name) if name else x.view_as(x)


def _copy(x: Tensor, name: str) -> Tensor:
    function = _CopyUnderTransforms if are_active() else _CopyToGroup
    return function.apply(x, name)  # pyright: ignore[reportReturnType]


class _CopyToGroup(torch.autograd.Function):
    """Not an op of the library: its result is its input, and an op may not return one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.ops.mcp_kernels.all_reduce(grads[0], ctx.name), None


class _CopyUnderTransforms(torch.autograd.Function):
    """The same as torch.func takes it, which costs more: it reads ``forward``'s signature."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, name: str) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.name = inputs

    backward = _CopyToGroup.backward

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_jvp("copy_to_group")


def _all_reduce_ref(x: Tensor, group: str) -> Tensor:
    pg: Any = _comm.resolve(group)
    local = getattr(pg, "direct", None)  # of a group in shared memory, which need not sum in place
    if local is not None and x.is_cpu and x.is_contiguous() and x.dtype in _fused.FLOATS:
        return local.sum_of(x)
    out = x.clone(memory_format=torch.contiguous_format)
    return out if pg is None else _comm.sum_over_ranks_(out, pg)


def _all_reduce_fake(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape)


def _all_reduce_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.group = inputs


def _all_reduce_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return replicated_gradient(grad, ctx.group), None


def replicated_gradient(grad: Tensor, group: str) -> Tensor:
    """``grad`` of a replicated value, about to be used by each rank in its own way.

    Nothing to do, unless it is differentiated in turn: what the ranks find for it is then summed.
    """
    # Under a transform what is around it may want a derivative that the gradient does not tell of.
    if group and torch.is_grad_enabled() and (grad.requires_grad or are_active()):
        return _copy(grad, group)
    return grad


def _reduce_scatter_ref(x: Tensor, group: str, scatter_dim: int) -> Tensor:
    pg = _comm.resolve(group)
    if pg is None:
        return x.clone(memory_format=torch.contiguous_format)
    return _comm.scatter_sum(x, pg, scatter_dim)


def _reduce_scatter_fake(x: Tensor, group: str, scatter_dim: int) -> Tensor:
    return x.new_empty(_comm.scattered_shape(list(x.shape), scatter_dim, group))


def _reduce_scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.group, ctx.dim = inputs
    ctx.size = x.shape[ctx.dim]


def _reduce_scatter_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.mcp_kernels.all_gather(grad, ctx.group, ctx.dim, ctx.size), None, None


def _all_gather_ref(x: Tensor, group: str, gather_dim: int, gather_size: int | None) -> Tensor:
    pg = _comm.resolve(group)
    if pg is None:
        return x.clone(memory_format=torch.contiguous_format)
    return _comm.gather(x, pg, gather_dim, gather_size)


def _all_gather_fake(x: Tensor, group: str, gather_dim: int, gather_size: int | None) -> Tensor:
    return x.new_empty(_comm.gathered_shape(x, gather_dim, gather_size, group))


def _all_gather_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.group, ctx.dim, _ = inputs


def _all_gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return torch.ops.mcp_kernels.reduce_scatter(grad, ctx.group, ctx.dim), None, None, None


def _all_reduce_vmap(info: Any, in_dims: Sequence[Any], x: Tensor, group: str) -> Result:
    return torch.ops.mcp_kernels.all_reduce(in_front(x, in_dims[0], info.batch_size), group), 0


def _reduce_scatter_vmap(
    info: Any, in_dims: Sequence[Any], x: Tensor, group: str, dim: int
) -> Result:
    x = in_front(x, in_dims[0], info.batch_size)
    return torch.ops.mcp_kernels.reduce_scatter(x, group, dim + 1), 0


def _all_gather_vmap(
    info: Any, in_dims: Sequence[Any], x: Tensor, group: str, dim: int, size: int | None
) -> Result:
    x = in_front(x, in_dims[0], info.batch_size)
    return torch.ops.mcp_kernels.all_gather(x, group, dim + 1, size), 0


define_op(
    "all_reduce(Tensor x, str group) -> Tensor",
    reference=_all_reduce_ref,
    fake=_all_reduce_fake,
    backward=_all_reduce_backward,
    setup_context=_all_reduce_setup,
    vmap=_all_reduce_vmap,
)
define_op(
    "reduce_scatter(Tensor x, str group, int scatter_dim) -> Tensor",
    reference=_reduce_scatter_ref,
    fake=_reduce_scatter_fake,
    backward=_reduce_scatter_backward,
    setup_context=_reduce_scatter_setup,
    vmap=_reduce_scatter_vmap,
)
define_op(
    "all_gather(Tensor x, str group, int gather_dim, SymInt? gather_size) -> Tensor",
    reference=_all_gather_ref,
    fake=_all_gather_fake,
    backward=_all_gather_backward,
    setup_context=_all_gather_setup,
    vmap=_all_gather_vmap,
)
