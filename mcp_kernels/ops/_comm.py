"""Collectives below autograd: what the tensor-parallel ops are made of.

A group travels through an op as its name, because a schema holds strings and not process groups;
the empty name means one rank and no communication. A size that the group does not divide is cut
the way ``torch.chunk`` cuts it: parts of ``ceil(size / W)``, the last ones shorter or empty. So a
padded transfer has all its padding at the end, and one narrow takes it off.

Sums are taken in rank order by the one rank that owns the element (gloo) or by the backend, and
rounded once: every rank then holds the same bits.

Letters: W = ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed.distributed_c10d import _resolve_process_group

from mcp_kernels.spans import communicates, communication

_NARROW_FLOATS = (torch.float16, torch.bfloat16)


def group_name(group: dist.ProcessGroup | None) -> str:
    """Name under which an op finds ``group``; None is the world, "" is a single rank.

    Raises:
        ValueError: this rank is not a member of ``group``.
    """
    if not dist.is_available() or not dist.is_initialized():
        return ""
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group_name: group must be a ProcessGroup this rank belongs to, got {group!r}; "
            "call collectives only on the ranks of their group"
        )
    return "" if group.size() == 1 else group.group_name


def resolve(name: str) -> dist.ProcessGroup | None:
    """The process group called ``name``; None for a single rank."""
    return _resolve_process_group(name) if name else None  # pyright: ignore[reportArgumentType]


def place(name: str) -> tuple[int, int]:
    """Rank in the group called ``name``, and its number of ranks; a constant to torch.compile."""
    group = resolve(name)
    return (0, 1) if group is None else (group.rank(), group.size())


# What torch.compiler.assume_constant_result sets; calling it would import all of dynamo, and with
# it Triton, each time this package is imported.
place._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def split_sizes(size: int, parts: int) -> list[int]:
    """Sizes of the ``parts`` pieces of ``size``, cut the way ``torch.chunk`` cuts."""
    step = -(-size // parts)
    return [max(0, min(step, size - index * step)) for index in range(parts)]


def normalize_dim(op: str, name: str, dim: int, rank: int) -> int:
    """``dim`` as a non-negative index into ``rank`` dimensions.

    Raises:
        ValueError: ``dim`` is out of range.
    """
    if not -rank <= dim < rank:
        raise ValueError(f"{op}: {name} must be in [{-rank}, {rank - 1}], got {dim}")
    return dim % rank


def pack_by_rank(x: Tensor, dim: int, world: int) -> Tensor:
    """``[..., W * s, ...]`` as contiguous ``[W, ..., s, ...]``; no copy where memory allows it."""
    return x.unflatten(dim, (world, x.shape[dim] // world)).movedim(dim, 0).contiguous()


Finish = Callable[[], Tensor]


class Carrier(Protocol):
    """Collectives that go on while their ranks compute; each gives a function that waits."""

    @property
    def rank(self) -> int:
        """Of this process."""
        ...

    @property
    def world(self) -> int:
        """Number of ranks."""
        ...

    def start_sum_(self, x: Tensor) -> Finish:
        """Replace contiguous ``x`` by its sum over the ranks."""
        ...

    def start_scatter(self, packed: Tensor) -> Finish:
        """Sum over ranks of ``packed[rank]``; ``packed``, ``[W, ...]``, must stay until then."""
        ...

    def start_gather(self, x: Tensor) -> Finish:
        """The ranks' ``x``, equal in shape, as ``[W, ...]``."""
        ...


@dataclass(frozen=True, slots=True)
class GroupCarrier:
    """A ``Carrier`` by the collectives of torch.distributed."""

    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.group.rank()

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.group.size()

    def start_sum_(self, x: Tensor) -> Finish:
        """See ``start_sum_over_ranks_``."""
        return start_sum_over_ranks_(x, self.group)

    def start_scatter(self, packed: Tensor) -> Finish:
        """See ``start_scatter_sum_packed``."""
        return start_scatter_sum_packed(packed, self.group)

    def start_gather(self, x: Tensor) -> Finish:
        """See ``start_gather_parts``."""
        return start_gather_parts(x, self.group)


def start_sum_over_ranks_(x: Tensor, group: dist.ProcessGroup) -> Finish:
    """``sum_over_ranks_`` that may go on meanwhile; the result is there when it is called."""
    if x.numel() == 0:
        return lambda: x
    if x.dtype in _NARROW_FLOATS and group.size() > 2 and _is_gloo(group, x):
        flat = x.view(-1)
        scattered = start_scatter_sum(flat, GroupCarrier(group), 0)
        return lambda: flat.copy_(gather(scattered(), group, 0, flat.numel())).view_as(x)
    options = dist.AllreduceOptions()
    options.asyncOp = True
    work = group.allreduce([x], options)

    def finish() -> Tensor:
        with communication("wait for a sum over ranks"):
            work.wait()
        return x

    return finish


@communicates("sum over ranks")
def sum_over_ranks_(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Replace contiguous ``x`` by its sum over the ranks.

    gloo rounds a 16-bit sum at each of its W - 1 hops, so above two ranks such a sum goes as a
    scatter of partial sums, added in float32, and a gather: the same bytes on the wire.
    """
    if x.numel() == 0 or (x.dtype in _NARROW_FLOATS and group.size() > 2 and _is_gloo(group, x)):
        return start_sum_over_ranks_(x, group)()
    group.allreduce([x], dist.AllreduceOptions()).wait()
    return x


@communicates("scatter of a sum")
def scatter_sum(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """This rank's part along ``dim`` of the sum of ``x`` over the ranks."""
    return start_scatter_sum(x, GroupCarrier(group), dim)()


def start_scatter_sum(x: Tensor, carrier: Carrier, dim: int) -> Finish:
    """``scatter_sum`` that may go on meanwhile; the result is there when it is called."""
    world, size = carrier.world, x.shape[dim]
    if size % world == 0:
        return carrier.start_scatter(pack_by_rank(x, dim, world))
    step = -(-size // world)
    padded = x.new_zeros(*x.shape[:dim], world * step, *x.shape[dim + 1 :])
    padded.narrow(dim, 0, size).copy_(x)
    finish = carrier.start_scatter(pack_by_rank(padded, dim, world))
    mine = split_sizes(size, world)[carrier.rank]
    return lambda: finish().narrow(dim, 0, mine).contiguous()


def scatter_sum_packed(packed: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks of ``packed[rank]``, where ``packed`` is contiguous ``[W, ...]``."""
    return start_scatter_sum_packed(packed, group)()


def start_scatter_sum_packed(packed: Tensor, group: dist.ProcessGroup) -> Finish:
    """``scatter_sum_packed`` that may go on meanwhile; ``packed`` must stay until it is called."""
    if packed.numel() == 0:
        return lambda: torch.zeros_like(packed[0])
    if _is_gloo(group, packed):
        # One exchange and a sum in cache beats gloo's reduce-scatter, which takes W - 1 hops.
        parts = torch.empty_like(packed)
        exchange = group.alltoall_base(parts, packed, [], [], dist.AllToAllOptions())

        def add_parts() -> Tensor:
            with communication("wait for parts of a sum"):
                exchange.wait()
            if group.size() == 2:
                return torch.add(parts[0], parts[1])
            return parts.sum(0, dtype=packed.dtype)

        return add_parts
    out = torch.empty_like(packed[0])
    options = dist.ReduceScatterOptions()
    options.asyncOp = True
    work = group._reduce_scatter_base(out.view(-1), packed.view(-1), options)

    def finish() -> Tensor:
        with communication("wait for a scattered sum"):
            work.wait()
        return out

    return finish


@communicates("gather")
def gather(x: Tensor, group: dist.ProcessGroup, dim: int, size: int | None = None) -> Tensor:
    """The ranks' ``x`` joined along ``dim``; ``size`` is the joined size where it is uneven."""
    return start_gather(x, GroupCarrier(group), dim, size)()


def start_gather(x: Tensor, carrier: Carrier, dim: int, size: int | None = None) -> Finish:
    """``gather`` that may go on meanwhile; the result is there when it is called."""
    world, local = carrier.world, x.shape[dim]
    step = local if size is None else -(-size // world)
    if local < step:
        padded = x.new_zeros(*x.shape[:dim], step, *x.shape[dim + 1 :])
        padded.narrow(dim, 0, local).copy_(x)
        x = padded
    arrive = carrier.start_gather(x)

    def finish() -> Tensor:
        joined = arrive().movedim(0, dim).flatten(dim, dim + 1)
        return joined if size is None else joined.narrow(dim, 0, size).contiguous()

    return finish


def start_gather_parts(x: Tensor, group: dist.ProcessGroup) -> Finish:
    """The ranks' ``x``, equal in shape, as ``[W, ...]``; there when it is called."""
    x = x.contiguous()
    parts = x.new_empty(group.size(), *x.shape)
    if parts.numel() == 0:
        return lambda: parts
    options = AllgatherOptions()
    options.asyncOp = True
    work = group._allgather_base(parts.view(-1), x.view(-1), options)

    def finish() -> Tensor:
        with communication("wait for a gather"):
            work.wait()
        return parts

    return finish


def check_gather_size(op: str, x: Tensor, dim: int, size: int | None, name: str) -> None:
    """Hold ``size`` against what this rank brings.

    Raises:
        ValueError: this rank's part is not the one that ``size`` gives it.
    """
    if size is None:
        return
    rank, world = place(name)
    expected = split_sizes(size, world)[rank]
    if x.shape[dim] != expected:
        raise ValueError(
            f"{op}: gather_size must cut into this rank's part of {x.shape[dim]}, got {size}, "
            f"which gives it {expected}; split as torch.chunk does"
        )


def gathered_shape(x: Tensor, dim: int, size: int | None, name: str) -> list[int]:
    """Shape of ``gather``'s result."""
    joined = x.shape[dim] * place(name)[1] if size is None else size
    return [*x.shape[:dim], joined, *x.shape[dim + 1 :]]


def scattered_shape(shape: list[int], dim: int, name: str) -> list[int]:
    """Shape of ``scatter_sum``'s result for an input of ``shape``."""
    rank, world = place(name)
    return [*shape[:dim], split_sizes(shape[dim], world)[rank], *shape[dim + 1 :]]


def backend_name(group: dist.ProcessGroup | None, x: Tensor) -> str:
    """What carries ``x`` between the ranks of ``group``."""
    if group is None:
        return "none"
    has_backends = isinstance(group, dist.ProcessGroup)  # else it is a backend by itself
    return group._get_backend(x.device).name() if has_backends else group.name()


def _is_gloo(group: dist.ProcessGroup, x: Tensor) -> bool:
    return backend_name(group, x) == "gloo"
