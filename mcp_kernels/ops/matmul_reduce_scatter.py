"""Row-parallel matmul whose sum is left sharded: the exit of a sequence-parallel region.

    y_r = part r, along scatter_dim, of (sum over ranks of x @ weight.T, plus bias once)
    dy = all-gather of dy_r    dx = dy @ weight    dweight = dy.T @ x    dbias = row sum of dy

Backward gathers ``dy`` once and uses it for all three; dx is computed row by row as ``dy`` arrives.

Source: Korthikanti et al., "Reducing activation recomputation" (2022), section 4.2.
Letters: K = in features of this rank, N = out features, W = ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcp_kernels._op import General, define_op, override
from mcp_kernels._transforms import Result, in_front, loop
from mcp_kernels.ops import _comm, _fused, _overlap, _overlap_group
from mcp_kernels.ops._autocast import under_autocast
from mcp_kernels.ops._deferred import deferring
from mcp_kernels.ops._linear import as_rows, check_features, check_linear, linear, linear_backward


def matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: ProcessGroup | None = None,
    scatter_dim: int = 0,
) -> Tensor:
    """This rank's part, along ``scatter_dim``, of the ranks' summed ``x @ weight.T + bias``.

    Args:
        x: ``[..., K]``, any strides; the same leading shape on every rank, K may differ.
        weight: ``[N, K]``, this rank's columns of the full weight, any strides, x's dtype.
        bias: ``[N]``, the same on every rank; added once.
        group: None is the world, or this process alone where torch.distributed is not set up.
        scatter_dim: a dimension of the product ``[..., N]``, cut as ``torch.chunk`` cuts it: the
            last ranks may get less or nothing.

    Returns:
        Contiguous, the shape of the product with this rank's part of ``scatter_dim``, x's dtype.

    Raises:
        ValueError: the shapes do not fit or ``scatter_dim`` is out of range.
        TypeError: the dtypes differ.

    Cost: 2 M N K flops, one reduce-scatter of ``[M, N]``, and one copy of the smaller of ``x`` and
    the product where ``scatter_dim`` is not the first dimension; backward 4 M N K flops, one
    all-gather.
    """
    x, weight, bias = under_autocast(x, weight, bias)
    check_linear("matmul_reduce_scatter", x, weight, bias)
    check_features("matmul_reduce_scatter", x.shape[-1], weight)
    dim = _comm.normalize_dim("matmul_reduce_scatter", "scatter_dim", scatter_dim, x.dim())
    name = _comm.group_name(group)
    if not name:
        return linear(x, weight, bias)  # differentiable as it stands
    return torch.ops.mcp_kernels.matmul_reduce_scatter(x, weight, bias, name, dim)


def _ref(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, scatter_dim: int) -> Tensor:
    pg = _comm.resolve(group)
    if pg is None:
        return linear(x, weight, bias)
    bias = bias if pg.rank() == 0 else None  # counted once
    world = pg.size()
    is_row_dim = scatter_dim < x.dim() - 1
    if is_row_dim and x.shape[scatter_dim] % world == 0 and x.shape[-1] <= weight.shape[0]:
        # The rows are put in rank order before the product, where they are narrower.
        packed = _comm.pack_by_rank(x, scatter_dim, world)
        return _comm.scatter_sum_packed(linear(packed, weight, bias), pg)
    return _comm.scatter_sum(linear(x, weight, bias), pg, scatter_dim)


def _overlapped(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, scatter_dim: int
) -> Tensor:
    carrier = _overlap_group.carrier(x, group)
    own = bias if carrier.rank == 0 else None  # counted once
    return _overlap.scatter_of_product(x, weight, own, carrier, scatter_dim)


def _why_not_overlapped(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, scatter_dim: int
) -> str | None:
    return _overlap.why_not_scatter(x, weight.shape[0], group, scatter_dim)


def _on_shm(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, scatter_dim: int) -> Tensor:
    """Blocks of the product go straight into shared memory; each rank sums what is its own."""
    columns = weight.shape[0]
    num_bytes = _fused.num_bytes(x, columns)
    space = _fused.workspace(group, num_bytes) if num_bytes else None
    if space is None:
        return _ref(x, weight, bias, group, scatter_dim)
    shape = [*x.shape[:-1], columns]
    region = _fused.part_along(shape, scatter_dim, space.rank, space.world)
    shape[scatter_dim] = _comm.split_sizes(shape[scatter_dim], space.world)[space.rank]
    out = x.new_empty(shape)
    bias = None if bias is None else bias.contiguous()
    pair = (as_rows(x), weight.t())
    return _fused.sum_of_products(space, "matmul_reduce_scatter", [pair], region, out, bias)


def _refuses(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, scatter_dim: int
) -> str | None:
    return _fused.why_not(x, group, _fused.num_bytes(x, weight.shape[0]))


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, scatter_dim: int) -> Tensor:
    full = [*x.shape[:-1], weight.shape[0]]
    return x.new_empty(_comm.scattered_shape(full, scatter_dim, group))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ctx.group, ctx.dim = inputs
    ctx.size = (*x.shape[:-1], weight.shape[0])[ctx.dim]
    needs_dx, needs_dw = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if needs_dw else None, weight if needs_dx else None)
    ctx.weight = weight


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    if not ctx.group:
        return *linear_backward(dy, x, weight, needs), None, None
    if torch.is_grad_enabled():  # of a gradient that is itself differentiated
        full = torch.ops.mcp_kernels.all_gather(dy, ctx.group, ctx.dim, ctx.size)
        dx, dw, _ = linear_backward(full, x, weight, (needs[0], needs[1], False))
        db = _bias_gradient(dy, ctx.group, ctx.dim, ctx.size) if needs[2] else None
        return dx, dw, db, None, None
    later = deferring()
    if later is not None and needs[1]:
        full = torch.ops.mcp_kernels.all_gather(dy, ctx.group, ctx.dim, ctx.size)
        later.add([ctx.weight], lambda: [torch.mm(as_rows(full).t(), as_rows(x))])
        dx, _, db = linear_backward(full, x, weight, (needs[0], False, needs[2]))
        return dx, None, db, None, None
    args = (dy, x, weight, list(needs), ctx.group, ctx.dim, ctx.size)
    grads = torch.ops.mcp_kernels.matmul_reduce_scatter_backward(*args)
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), None, None


def _vmap(info: Any, in_dims: Sequence[Any], *args: Any) -> Result:
    op, (x, weight, bias, group, dim) = torch.ops.mcp_kernels.matmul_reduce_scatter, args
    if any(d is not None for d in in_dims[1:3]):  # a product for each sample
        return loop(op, info, in_dims, args)
    return op(in_front(x, in_dims[0], info.batch_size), weight, bias, group, dim + 1), 0


def _bias_gradient(dy: Tensor, group: str, dim: int, size: int) -> Tensor:
    """The replicated sum over all rows, made of what each rank adds to it.

    The bias counts once, the gathered dy once for each rank: only a sum over ranks has that right.
    """
    own = as_rows(dy).sum(0)
    pg = _comm.resolve(group)
    if pg is not None and dim == dy.dim() - 1:
        sizes = _comm.split_sizes(size, pg.size())
        before = sum(sizes[: pg.rank()])
        own = torch.nn.functional.pad(own, (before, size - before - own.numel()))
    return torch.ops.mcp_kernels.all_reduce(own, group)


def _backward_ref(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    needs: list[bool],
    group: str,
    dim: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    pg = _comm.resolve(group)
    full = dy if pg is None else _comm.gather(dy, pg, dim, size)
    grads = linear_backward(full, x, weight, (needs[0], needs[1], needs[2]))
    return _each(grads, dy)


def _each(grads: tuple[Tensor | None, ...], like: Tensor) -> Any:
    """An op gives a tensor for each result: an empty one where no gradient is needed."""
    return tuple(like.new_empty(0) if grad is None else grad for grad in grads)


def _backward_overlapped(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    needs: list[bool],
    group: str,
    dim: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of dx as their dy arrives, the others when all has."""
    assert weight is not None
    shape = [*dy.shape[:dim], size, *dy.shape[dim + 1 : -1], weight.shape[1]]
    dx = dy.new_empty(shape)
    multiply = _overlap.multiply_rows([dx], [weight.t()], [])
    full = _overlap.Gather(dy, _overlap_group.carrier(dy, group), dim).join(multiply)
    _, dw, db = linear_backward(full, x, None, (False, needs[1], needs[2]))
    return _each((dx, dw, db), dy)


def _why_not_backward_overlapped(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    needs: list[bool],
    group: str,
    dim: int,
    size: int,
) -> str | None:
    if not needs[0] or weight is None:
        return "needs dx to compute while dy arrives"
    return _overlap.why_not_gather(dy, group, dim, size)


def _backward_on_shm(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    needs: list[bool],
    group: str,
    dim: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    space = _fused.workspace(group, _gathered_bytes(dy, dim, size))
    if space is None:
        return _backward_ref(dy, x, weight, needs, group, dim, size)
    shape = [*dy.shape[:dim], size, *dy.shape[dim + 1 :]]
    dx = dy.new_empty(*shape[:-1], weight.shape[1]) if needs[0] and weight is not None else None

    def multiply(rows: Tensor, begin: int, end: int) -> None:
        if dx is not None and weight is not None:
            into = dx.view(rows.shape[0], weight.shape[1])[begin:end]
            torch.mm(rows[begin:end], weight, out=into)

    sizes = _comm.split_sizes(size, space.world)
    full = _fused.gather_rows(space, "matmul_reduce_scatter", dy, dim, sizes, multiply)
    _, dw, db = linear_backward(full, x, None, (False, needs[1], needs[2]))
    return _each((dx, dw, db), dy)


def _gathered_bytes(dy: Tensor, dim: int, size: int) -> int:
    shape = [*dy.shape[:dim], size, *dy.shape[dim + 1 :]]
    return torch.Size(shape).numel() * dy.element_size()


def _backward_refuses(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    needs: list[bool],
    group: str,
    dim: int,
    size: int,
) -> str | None:
    return _fused.why_not(dy, group, _gathered_bytes(dy, dim, size))


def _backward_fake(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    needs: list[bool],
    group: str,
    dim: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = [*dy.shape[:dim], size, *dy.shape[dim + 1 :]]
    dx = dw = db = None
    if needs[0] and weight is not None:
        dx = dy.new_empty(*shape[:-1], weight.shape[1])
    if needs[1] and x is not None:
        dw = dy.new_empty(shape[-1], x.shape[-1])
    if needs[2]:
        db = dy.new_empty(shape[-1])
    return _each((dx, dw, db), dy)


define_op(
    "matmul_reduce_scatter(Tensor x, Tensor weight, Tensor? bias, str group, int scatter_dim)"
    " -> Tensor",
    reference=_ref,
    fake=_fake,
    backward=_backward,
    setup_context=_setup,
    vmap=_vmap,
    general=General("overlap", _overlapped, _why_not_overlapped),
)
define_op(
    "matmul_reduce_scatter_backward(Tensor dy, Tensor? x, Tensor? weight, bool[] needs, str group,"
    " int scatter_dim, SymInt size) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    reference=_backward_ref,
    fake=_backward_fake,
    general=General("overlap", _backward_overlapped, _why_not_backward_overlapped),
)
override("matmul_reduce_scatter", _on_shm, "CPU", backend="shm", refuses=_refuses)
override(
    "matmul_reduce_scatter_backward",
    _backward_on_shm,
    "CPU",
    backend="shm",
    refuses=_backward_refuses,
)
