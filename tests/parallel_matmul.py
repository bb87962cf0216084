"""Inputs of the tensor-parallel matmul tests: the unsharded problem, its answer, each rank's part.

The answer and the gradients come from float64 autograd on the same rounded inputs, in one process.
Letters: K = in features, N = out features.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcp_kernels.ops import _comm, _fused, _overlap_cut, _overlap_group
from mcp_kernels.testing import sum_error_bound

# What carries the ranks' data: gloo, where the references run; gloo between hosts, a host for each
# rank, where products are cut however small; shared memory, where a product of the tests is one
# block; and slots so small that it is many, and ranks share the work of a sum. A few tests take
# "shm_hosts" besides, backend shm with a host for each rank: the code of "hosts" on its own gloo.
needs_shm = pytest.mark.skipif(
    importlib.util.find_spec("mcp_kernels._shm") is None, reason="the _shm extension was not built"
)
carriers = pytest.mark.parametrize(
    "carrier",
    [
        "gloo",
        "hosts",
        pytest.param("shm", marks=needs_shm),
        pytest.param("small_shm", marks=needs_shm),
    ],
)


def carried(rank: int, world: int, carrier: str, fn: Callable[..., Any], *args: Any) -> Any:
    """``fn(rank, world, *args)`` where the default group is carried by ``carrier``."""
    if carrier == "gloo":
        return fn(rank, world, *args)
    if carrier in ("hosts", "shm_hosts"):
        return _between_hosts(rank, world, carrier, fn, *args)
    from mcp_kernels.shm import workspace  # registers the backend

    usual: Any = dist.group.WORLD
    kept = workspace.SLOT_BYTES, _fused._MIN_COLUMNS, _fused._MIN_OWN_ROWS, _fused._SHARE_BYTES
    group: Any = dist.new_group(list(range(world)), backend="shm")
    try:
        if carrier == "small_shm":
            workspace.SLOT_BYTES = (256, 512)
            _fused._MIN_COLUMNS, _fused._MIN_OWN_ROWS, _fused._SHARE_BYTES = 4, 1, 0
            _fused.blocks_of.cache_clear()
        dist.distributed_c10d._update_default_pg(group)
        return fn(rank, world, *args)
    finally:
        dist.distributed_c10d._update_default_pg(usual)
        workspace.SLOT_BYTES, *constants = kept
        _fused._MIN_COLUMNS, _fused._MIN_OWN_ROWS, _fused._SHARE_BYTES = constants
        _fused.blocks_of.cache_clear()


def _between_hosts(rank: int, world: int, carrier: str, fn: Callable[..., Any], *args: Any) -> Any:
    usual: Any = dist.group.WORLD
    host_number = _overlap_group.host_number
    names = ("PIECE_BYTES", "MIN_ROWS", "MIN_COLUMNS")
    kept = [getattr(_overlap_cut, name) for name in names]
    members = list(range(world))
    if carrier == "hosts":
        group: Any = dist.new_group(members, backend="gloo")
    else:
        from mcp_kernels.shm import ShmOptions

        options = ShmOptions(host_id=str(rank))
        group = dist.new_group(members, backend="shm", pg_options=options)
    try:
        for name in names:
            setattr(_overlap_cut, name, 2)
        _overlap_group.host_number = lambda: rank
        dist.distributed_c10d._update_default_pg(group)
        return fn(rank, world, *args)
    finally:
        dist.distributed_c10d._update_default_pg(usual)
        _overlap_group.host_number = host_number
        for name, value in zip(names, kept, strict=True):
            setattr(_overlap_cut, name, value)


@dataclass(frozen=True)
class Case:
    lead: tuple[int, ...]
    in_features: int
    out_features: int
    has_bias: bool
    is_strided: bool = False


@dataclass(frozen=True)
class Part:
    """What one rank gives to the op."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None

    def leaves(self) -> list[Tensor]:
        return [self.x, self.weight, *([] if self.bias is None else [self.bias])]


@dataclass(frozen=True)
class Problem:
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    exact: Tensor
    world: int
    split: Literal["in", "out"]
    dim: int
    is_strided: bool
    requires_grad: bool

    def cut(self, full: Tensor, rank: int, dim: int) -> Tensor:
        return full.split(_comm.split_sizes(full.shape[dim], self.world), dim)[rank]

    def local(self, rank: int) -> Part:
        """Rank's part: its in features of x and weight ("in"), or its rows and out features."""
        if self.split == "in":
            x, weight, bias = self.cut(self.x, rank, -1), self.cut(self.weight, rank, 1), self.bias
        else:
            x, weight = self.cut(self.x, rank, self.dim), self.cut(self.weight, rank, 0)
            bias = None if self.bias is None else self.cut(self.bias, rank, 0)
        spread = _strided if self.is_strided else torch.clone
        made = [None if t is None else spread(t) for t in (x, weight, bias)]
        if self.requires_grad:
            made = [None if t is None else t.requires_grad_() for t in made]
        return Part(*made)  # pyright: ignore[reportArgumentType]

    def dy(self) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        return torch.randn(self.exact.shape, generator=generator, dtype=torch.float64)

    def grads(self, dy: Tensor) -> list[Tensor]:
        """Gradients of the unsharded problem for x, weight and (if there is one) bias."""
        leaves = [t.detach().clone().requires_grad_() for t in (self.x, self.weight)]
        if self.bias is not None:
            leaves.append(self.bias.detach().clone().requires_grad_())
        y = torch.nn.functional.linear(*leaves)
        return list(torch.autograd.grad(y, leaves, dy))


def cases() -> list[Case]:
    """Leading shapes, sizes that no W divides, empty rows, fewer features than ranks, strides."""
    return [
        Case((12,), 24, 12, has_bias=True),
        Case((2, 12), 24, 12, has_bias=False),
        Case((2, 12), 13, 36, has_bias=True, is_strided=True),
        Case((3, 7), 11, 5, has_bias=True),
        Case((7, 2, 3), 9, 7, has_bias=False, is_strided=True),
        Case((0, 3), 8, 5, has_bias=True),
        Case((1, 1), 2, 3, has_bias=True),
        Case((12,), 1, 5, has_bias=True),
    ]


def make(
    case: Case,
    dtype: torch.dtype,
    world: int,
    *,
    split: Literal["in", "out"],
    dim: int = 0,
    requires_grad: bool = False,
) -> Problem:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    x, weight = draw(*case.lead, case.in_features), draw(case.out_features, case.in_features)
    bias = draw(case.out_features) if case.has_bias else None
    exact = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    return Problem(x, weight, bias, exact, world, split, dim, case.is_strided, requires_grad)


def rounding_bound(problem: Problem, dtype: torch.dtype, partials: int) -> Tensor:
    """Most that ``partials`` rounded partial products, summed and rounded once, may be off.

    Each product is a sum of K terms in the accumulator, rounded to the output type; their sum is
    taken in the accumulator and rounded once more.
    """
    magnitude = torch.nn.functional.linear(
        problem.x.double().abs(),
        problem.weight.double().abs(),
        None if problem.bias is None else problem.bias.double().abs(),
    )
    terms = problem.x.shape[-1] + partials + 1
    once = sum_error_bound(problem.exact, magnitude, terms, dtype)
    return once if partials == 1 else once + 0.5 * torch.finfo(dtype).eps * magnitude


def count_collectives(profile: torch.profiler.profile) -> int:
    """Collectives that ran inside ``profile``."""
    return sum(e.count for e in profile.key_averages() if e.key.startswith("c10d::"))


def _strided(x: Tensor) -> Tensor:
    """The same values behind an inner stride of 2 and a storage offset."""
    padded = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1] + 1)
    padded[..., 1::2] = x
    return padded[..., 1::2]
