"""Row-parallel matmul whose sum is left sharded: the exit of a sequence-parallel region.

    y_r = part r, along scatter_dim, of (sum over ranks of x @ weight.T, plus bias once)
    dy = all-gather of dy_r    dx = dy @ weight    dweight = dy.T @ x    dbias = row sum of dy

Backward gathers ``dy`` once and uses it for all three.

Source: Korthikanti et al., "Reducing activation recomputation" (2022), section 4.2.
Letters: K = in features of this rank, N = out features, W = ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcp_kernels._op import define_op
from mcp_kernels.ops import _comm
from mcp_kernels.ops._autocast import under_autocast
from mcp_kernels.ops._linear import check_features, check_linear, linear, linear_backward


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


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, scatter_dim: int) -> Tensor:
    full = [*x.shape[:-1], weight.shape[0]]
    return x.new_empty(_comm.scattered_shape(full, scatter_dim, group))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ctx.group, ctx.dim = inputs
    ctx.size = (*x.shape[:-1], weight.shape[0])[ctx.dim]
    needs_dx, needs_dw = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if needs_dw else None, weight if needs_dx else None)


def _backward(
    ctx: Any, dy: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
    x, weight = ctx.saved_tensors
    if ctx.group:
        dy = torch.ops.mcp_kernels.all_gather(dy, ctx.group, ctx.dim, ctx.size)
    return *linear_backward(dy, x, weight, ctx.needs_input_grad[:3]), None, None


define_op(
    "matmul_reduce_scatter(Tensor x, Tensor weight, Tensor? bias, str group, int scatter_dim)"
    " -> Tensor",
    reference=_ref,
    fake=_fake,
    backward=_backward,
    setup_context=_setup,
)
