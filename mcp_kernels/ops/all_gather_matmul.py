"""Column-parallel matmul of a sharded input: the entry of a sequence-parallel region.

    x = all-gather of x_r along gather_dim       gathered once for all weights; or replicated
    y_i = x @ weight_i.T + bias_i
    dx_r = reduce-scatter of sum_i dy_i @ weight_i      all-reduce where x is replicated
    dweight_i = dy_i.T @ x                              under the sum of dx

Source: Korthikanti et al., "Reducing activation recomputation" (2022), section 4.2.
Letters: K = in features, N = out features of this rank, W = ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcp_kernels._op import General, define_op, override
from mcp_kernels._transforms import Result, are_active, in_front, loop, refuse_jvp
from mcp_kernels.ops import _column_backward, _column_forward, _comm
from mcp_kernels.ops._autocast import under_autocast
from mcp_kernels.ops._deferred import deferring
from mcp_kernels.ops._linear import as_rows, check_features, check_linear, linear
from mcp_kernels.ops.collectives import replicated_gradient

_BATCHED: Any = torch._C._parse_dispatch_key("Batched")


@overload
def all_gather_matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: ProcessGroup | None = None,
    gather_dim: int | None = 0,
    gather_size: int | None = None,
    save_gathered: bool = True,
) -> Tensor: ...
@overload
def all_gather_matmul(
    x: Tensor,
    weight: Sequence[Tensor],
    bias: Sequence[Tensor | None] | None = None,
    *,
    group: ProcessGroup | None = None,
    gather_dim: int | None = 0,
    gather_size: int | None = None,
    save_gathered: bool = True,
) -> list[Tensor]: ...
def all_gather_matmul(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    group: ProcessGroup | None = None,
    gather_dim: int | None = 0,
    gather_size: int | None = None,
    save_gathered: bool = True,
) -> Tensor | list[Tensor]:
    """``x`` gathered along ``gather_dim``, times ``weight.T``, plus ``bias``.

    Args:
        x: this rank's part of ``[..., K]``, any strides.
        weight: ``[N, K]``, this rank's rows of the full weight, any strides, x's dtype; or a
            sequence of such weights (q, k and v, say), which share one gather.
        bias: ``[N]`` of this rank's rows; for a sequence of weights, one (or None) each.
        group: None is the world, or this process alone where torch.distributed is not set up.
        gather_dim: the dimension of ``x`` that is joined; None where every rank holds all of ``x``
            (a column-parallel layer outside of a sequence-parallel region).
        gather_size: joined size; needed where the ranks' parts differ, and then each must be what
            ``torch.chunk`` of that size gives. None promises equal parts.
        save_gathered: keep the gathered ``x`` for backward (W times the memory of ``x``). False
            keeps ``x`` and gathers again.

    Returns:
        Contiguous ``[..., N]`` of x's dtype; a list of them for a sequence of weights.

    Raises:
        ValueError: the shapes, ``gather_dim`` or ``gather_size`` do not fit.
        TypeError: the dtypes differ.

    Cost: 2 M N K flops a weight, one all-gather of ``[M, K]``, one copy of it where ``gather_dim``
    is not the first dimension; backward 4 M N K flops a weight and one reduce-scatter, plus one
    all-gather without ``save_gathered``.
    """
    dim = gather_dim
    if dim is not None:
        dim = _comm.normalize_dim("all_gather_matmul", "gather_dim", dim, x.dim())
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    biases = _as_biases(bias, len(weights))
    x, *flat = under_autocast(x, *weights, *biases)
    weights, biases = flat[: len(weights)], flat[len(weights) :]
    name = _comm.group_name(group)
    _check(x, weights, biases, name, dim, gather_size)
    given = [b for b in biases if b is not None]
    if not name:
        ys = [linear(x, *pair) for pair in zip(weights, biases, strict=True)]
        return ys[0] if isinstance(weight, Tensor) else ys
    is_fused = len(given) == len(weights)  # else biases are added to the products
    fused = given if is_fused else []
    if torch.compiler.is_compiling() or are_active():
        args = (x, weights, fused, name, dim, gather_size, save_gathered)
        ys, _ = torch.ops.mcp_kernels.all_gather_matmul(*args)
    else:
        *ys, _ = _AllGatherMatmul.apply(
            x, name, dim, gather_size, save_gathered, len(weights), *weights, *fused
        )
    if not is_fused:
        ys = [y if b is None else y + b for y, b in zip(ys, biases, strict=True)]
    return ys[0] if isinstance(weight, Tensor) else ys


def _as_biases(bias: Tensor | Sequence[Tensor | None] | None, count: int) -> list[Tensor | None]:
    if bias is None:
        return [None] * count
    biases: list[Tensor | None] = [bias] if isinstance(bias, Tensor) else list(bias)
    if len(biases) != count:
        raise ValueError(
            f"all_gather_matmul: bias must be one for each of {count} weights, got {len(biases)}; "
            "give None where a weight has none"
        )
    return biases


def _check(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    name: str,
    dim: int | None,
    size: int | None,
) -> None:
    if not weights:
        raise ValueError("all_gather_matmul: weight must hold at least one tensor, got none")
    for weight, bias in zip(weights, biases, strict=True):
        check_linear("all_gather_matmul", x, weight, bias)
    if dim is not None:
        _comm.check_gather_size("all_gather_matmul", x, dim, size, name)
    in_features = _column_forward.gathered_shape(x, dim, size, name)[-1]
    for weight in weights:
        check_features("all_gather_matmul", in_features, weight)


def _save(ctx: Any, inputs: tuple[Any, ...], gathered: Tensor) -> None:
    x, weights, _, ctx.group, ctx.dim, ctx.size, save_gathered = inputs
    ctx.set_materialize_grads(False)
    ctx.is_gathered = save_gathered and bool(ctx.group) and ctx.dim is not None
    ctx.save_for_backward(gathered if ctx.is_gathered else x, *weights)
    ctx.weights = list(weights)


def _gradients(
    ctx: Any,
    dys: Sequence[Tensor | None],
    d_gathered: Tensor | None,
    needs: tuple[bool, Sequence[bool], Sequence[bool]],
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """Gradients of (x, weights, biases), each only where ``needs`` asks for it."""
    x, *weights = ctx.saved_tensors
    pairs = [
        (i, dy, w) for i, (dy, w) in enumerate(zip(dys, weights, strict=True)) if dy is not None
    ]
    later = deferring()
    if later is not None and any(needs[1]):
        _column_backward.defer(ctx, later, x, [pair for pair in pairs if needs[1][pair[0]]])
        needs = (needs[0], [False] * len(weights), needs[2])
    # Of many gradients at once (is_grads_batched) torch takes no op with lists.
    is_one = not any(torch._C._dispatch_keys(dy).has(_BATCHED) for _, dy, _ in pairs)
    if ctx.group and pairs and d_gathered is None and is_one and not torch.is_grad_enabled():
        return _fused_gradients(ctx, x, pairs, len(weights), needs)
    needs_dx, needs_dw, needs_db = needs
    if ctx.dim is None:
        x = replicated_gradient(x, ctx.group)
    elif ctx.group and not ctx.is_gathered and any(needs_dw):
        x = torch.ops.mcp_kernels.all_gather(x, ctx.group, ctx.dim, ctx.size)
    dws: list[Tensor | None] = [None] * len(weights)
    dbs: list[Tensor | None] = [None] * len(needs_db)
    dx: Tensor | None = None
    for i, dy, weight in pairs:
        dy_MN = as_rows(dy)
        if needs_dx:
            dx = torch.mm(dy_MN, weight) if dx is None else torch.addmm(dx, dy_MN, weight)
        if needs_dw[i]:
            dws[i] = torch.mm(dy_MN.t(), as_rows(x))
        if needs_db and needs_db[i]:
            dbs[i] = dy_MN.sum(0)
    if dx is not None:
        dx = dx.reshape(*pairs[0][1].shape[:-1], dx.shape[-1])
    if ctx.is_gathered and needs_dx and d_gathered is not None:  # only in double backward
        dx = d_gathered if dx is None else dx + d_gathered
    if ctx.group and dx is not None:
        dx = _sum_op(dx, ctx.group, ctx.dim)
    return dx, dws, dbs


def _fused_gradients(
    ctx: Any,
    x: Tensor,
    pairs: list[tuple[int, Tensor, Tensor]],
    count: int,
    needs: tuple[bool, Sequence[bool], Sequence[bool]],
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """``_gradients`` by one op, below autograd."""
    needs_dx, needs_dw, needs_db = needs
    dws: list[Tensor | None] = [None] * count
    dbs: list[Tensor | None] = [None] * len(needs_db)
    dx, found = torch.ops.mcp_kernels.all_gather_matmul_backward(
        [dy for _, dy, _ in pairs],
        [weight for _, _, weight in pairs],
        x,
        [needs_dx, *(needs_dw[i] for i, _, _ in pairs)],
        ctx.group,
        ctx.dim,
        ctx.size,
        ctx.is_gathered,
    )
    for (i, dy, _), dw in zip(pairs, found, strict=True):
        dws[i] = dw if needs_dw[i] else None
        if needs_db and needs_db[i]:
            dbs[i] = as_rows(dy).sum(0)
    return dx if needs_dx else None, dws, dbs


def _sum_op(dx: Tensor, group: str, dim: int | None) -> Tensor:
    if dim is None:
        return torch.ops.mcp_kernels.all_reduce(dx, group)
    return torch.ops.mcp_kernels.reduce_scatter(dx, group, dim)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[list[Tensor], Tensor]) -> None:
    _save(ctx, inputs, output[1])


def _backward(ctx: Any, dys: list[Tensor | None], d_gathered: Tensor | None) -> tuple[Any, ...]:
    dx, dws, dbs = _gradients(ctx, dys, d_gathered, ctx.needs_input_grad[:3])
    return dx, dws, dbs, None, None, None, None


class _AllGatherMatmul(torch.autograd.Function):
    """The op with its lists laid flat: what torch.library adds to an op with lists costs 0.2 ms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        name, dim, size, save_gathered, count, *flat = rest
        inputs = (x, flat[:count], flat[count:], name, dim, size, save_gathered)
        ys, gathered = torch.ops.mcp_kernels.all_gather_matmul(*inputs)
        ctx.count = count
        _save(ctx, inputs, gathered)
        return (*ys, gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        needs_dx, *needs = ctx.needs_input_grad
        needs_flat = needs[5:]
        dx, dws, dbs = _gradients(
            ctx, grads[:-1], grads[-1], (needs_dx, needs_flat[: ctx.count], needs_flat[ctx.count :])
        )
        return dx, None, None, None, None, None, *dws, *dbs


class _UnderTransforms(torch.autograd.Function):
    """The same as torch.func takes it."""

    @staticmethod
    def forward(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        name, dim, size, save_gathered, count, *flat = rest
        args = (x, flat[:count], flat[count:], name, dim, size, save_gathered)
        ys, gathered = torch.ops.mcp_kernels.all_gather_matmul(*args)
        return (*ys, gathered)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, name, dim, size, save_gathered, ctx.count, *flat = inputs
        weights, biases = flat[: ctx.count], flat[ctx.count :]
        _save(ctx, (x, weights, biases, name, dim, size, save_gathered), output[-1])

    backward = _AllGatherMatmul.backward

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_jvp("all_gather_matmul")

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], *args: Any) -> Result:
        x, name, dim, size, save_gathered, count, *flat = args
        args = (x, flat[:count], flat[count:], name, dim, size, save_gathered)
        flat_dims = list(in_dims[6:])
        dims = (in_dims[0], flat_dims[:count], flat_dims[count:], None, None, None, None)
        (ys, gathered), (y_dims, gathered_dim) = _vmap(info, dims, *args)
        return (*ys, gathered), (*y_dims, gathered_dim)


def _under_transforms(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], *rest: Any
) -> tuple[list[Tensor], Tensor]:
    *ys, gathered = _UnderTransforms.apply(x, *rest, len(weights), *weights, *biases)
    return ys, gathered


def _vmap(info: Any, in_dims: Sequence[Any], *args: Any) -> Result:
    op, (x, weights, biases, group, dim, size, save_gathered) = (
        torch.ops.mcp_kernels.all_gather_matmul,
        args,
    )
    if any(d is not None for d in (*in_dims[1], *in_dims[2])):  # a product for each sample
        return loop(op, info, in_dims, args)
    x, at = in_front(x, in_dims[0], info.batch_size), None if dim is None else dim + 1
    ys, gathered = op(x, weights, biases, group, at, size, save_gathered)
    is_gathered = save_gathered and group and dim is not None
    return (ys, gathered), ([0] * len(ys), 0 if is_gathered else None)


define_op(
    _column_forward.SCHEMA,
    reference=_column_forward.reference,
    fake=_column_forward.fake,
    backward=_backward,
    setup_context=_setup,
    vmap=_vmap,
    under_transforms=_under_transforms,
    general=General("overlap", _column_forward.overlapped, _column_forward.why_not_overlapped),
)
define_op(_column_backward.SCHEMA, reference=_column_backward.reference, fake=_column_backward.fake)
override(
    "all_gather_matmul",
    _column_forward.on_shm,
    "CPU",
    backend="shm",
    refuses=_column_forward.refuses,
)
override(
    "all_gather_matmul_backward",
    _column_backward.on_shm,
    "CPU",
    backend="shm",
    refuses=_column_backward.refuses,
)
