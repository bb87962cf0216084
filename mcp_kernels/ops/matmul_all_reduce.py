"""Row-parallel matmul: each rank holds a slice of the in features, the products are summed.

    y = sum over ranks of x_r @ weight_r.T, plus bias once
    dx_r = dy @ weight_r    dweight_r = dy.T @ x_r    dbias = sum of the rows of dy

``y`` is replicated and so is ``dy`` (the convention of ``collectives.py``): backward needs no
communication.

Source: Shoeybi et al., "Megatron-LM" (2019), section 3.
Letters: K = in features of this rank, N = out features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcp_kernels._op import General, define_op, override
from mcp_kernels._transforms import Result, in_front, loop
from mcp_kernels.ops import _comm, _fused, _overlap, _overlap_group
from mcp_kernels.ops._autocast import under_autocast
from mcp_kernels.ops._deferred import deferring
from mcp_kernels.ops._linear import as_rows, check_features, check_linear, linear, linear_backward
from mcp_kernels.ops.collectives import replicated_gradient

if TYPE_CHECKING:
    from mcp_kernels.shm.local import LocalComm


def matmul_all_reduce(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: ProcessGroup | None = None
) -> Tensor:
    """Sum over the ranks of ``x @ weight.T``, plus ``bias`` once, on every rank.

    Args:
        x: ``[..., K]``, any strides; the same leading shape on every rank, K may differ.
        weight: ``[N, K]``, this rank's columns of the full weight, any strides, x's dtype.
        bias: ``[N]``, the same on every rank.
        group: None is the world, or this process alone where torch.distributed is not set up.

    Returns:
        Contiguous ``[..., N]`` of x's dtype, the same bits on every rank.

    Raises:
        ValueError: the shapes do not fit.
        TypeError: the dtypes differ.

    Cost: 2 M N K flops and one all-reduce of ``[M, N]``; backward 4 M N K flops, no communication.
    """
    local = _fused.direct_group(group, x, weight, bias)
    if local is None:
        x, weight, bias = under_autocast(x, weight, bias)
    check_linear("matmul_all_reduce", x, weight, bias)
    check_features("matmul_all_reduce", x.shape[-1], weight)
    if local is not None:
        return _sum_in_place(x, weight, bias, local)
    name = _comm.group_name(group)
    if not name:
        return linear(x, weight, bias)  # differentiable as it stands
    return torch.ops.mcp_kernels.matmul_all_reduce(x, weight, bias, name)


def _ref(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
    pg = _comm.resolve(group)
    if pg is None:
        return linear(x, weight, bias)
    # One rank adds the bias, so it is counted once and costs no pass over the sum.
    return _comm.sum_over_ranks_(linear(x, weight, bias if pg.rank() == 0 else None), pg)


def _overlapped(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
    carrier = _overlap_group.carrier(x, group)
    own = bias if carrier.rank == 0 else None  # counted once
    return _overlap.sum_of_product(x, weight, own, carrier)


def _why_not_overlapped(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> str | None:
    return _overlap.why_not_product(x, weight.shape[0], group)


def _on_shm(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
    pg: Any = _comm.resolve(group)
    return _sum_in_place(x, weight, bias, pg.direct)


def _sum_in_place(x: Tensor, weight: Tensor, bias: Tensor | None, local: LocalComm) -> Tensor:
    """The product, summed where it stands by one call of the compiled group.

    A sum in blocks under the matmul was measured too, straight in shared memory and so with less to
    copy: at two ranks with a core each it takes 1 to 7 % longer. MKL loses more on narrower blocks
    (2 to 7 %) than a block in the cache saves, and a core has nothing else to do meanwhile.
    """
    out = linear(x, weight, bias if local.rank == 0 else None)  # the bias is counted once
    if out.numel():
        local.sum_(out)
    return out


def _refuses(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> str | None:
    return _fused.why_not(x, group, 0)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ctx.group = inputs
    needs_dx, needs_dw = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if needs_dw else None, weight if needs_dx else None)
    ctx.weight = weight


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
    x, weight = ctx.saved_tensors
    needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
    each = replicated_gradient(dy, ctx.group)  # the bias is replicated as dy is, the rest is not
    later = deferring()
    if later is not None and needs_dw:
        later.add([ctx.weight], lambda: [torch.mm(as_rows(each).t(), as_rows(x))])
        needs_dw = False
    dx, dw, _ = linear_backward(each, x, weight, (needs_dx, needs_dw, False))
    _, _, db = linear_backward(dy, None, None, (False, False, needs_db))
    return dx, dw, db, None


def _vmap(info: Any, in_dims: Sequence[Any], *args: Any) -> Result:
    op, (x, *rest) = torch.ops.mcp_kernels.matmul_all_reduce, args
    if any(dim is not None for dim in in_dims[1:3]):  # a product for each sample
        return loop(op, info, in_dims, args)
    return op(in_front(x, in_dims[0], info.batch_size), *rest), 0


define_op(
    "matmul_all_reduce(Tensor x, Tensor weight, Tensor? bias, str group) -> Tensor",
    reference=_ref,
    fake=_fake,
    backward=_backward,
    setup_context=_setup,
    vmap=_vmap,
    general=General("overlap", _overlapped, _why_not_overlapped),
)
override("matmul_all_reduce", _on_shm, "CPU", backend="shm", refuses=_refuses)
