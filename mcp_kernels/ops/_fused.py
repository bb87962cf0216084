"""The tensor-parallel matmuls on shared memory: products go straight into what the group shares.

A product that is to be summed is computed in blocks, each into a slot of the group's workspace;
while a rank computes the next one, what its peers have published by then is summed. An input that
is to be gathered is published first; rows are multiplied as they arrive, this rank's own before
all. Ranks make the same blocks in any timing, so results do not depend on it.

Letters: M = rows, K = in features, N = out features, W = ranks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]

from mcp_kernels.ops import _comm

if TYPE_CHECKING:
    from mcp_kernels.shm.local import LocalComm
    from mcp_kernels.shm.workspace import Workspace

_PLAIN = (Tensor, torch.nn.Parameter)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Columns of a block: narrower ones cost MKL 4 % of a matmul at 512 columns and 7 % at 256, since it
# packs the other operand anew for each; a block as wide as the product could not overlap anything.
_MIN_COLUMNS = 512
# From here on ranks share the work of a sum instead of reading all copies whole, counted over all
# peers' copies of a block; never at two ranks, where both ways read as much.
_SHARE_BYTES = 256 << 10
# Rows of a rank from which its part is a matmul of its own: two of 256 rows cost 5 % more than one
# of 512 in float32, two of 64 a quarter more.
_MIN_OWN_ROWS = 512

Body = Callable[..., Any]
# A block of a product: first row, rows, first column, columns.
Block = tuple[int, int, int, int]


def why_not(x: Tensor, group: str, num_bytes: int) -> str | None:
    """Why the ranks of ``group`` would not take the fused path for ``x``; None where they would.

    The same on all ranks: it depends on the group, the dtype and the size of the result.
    """
    if not group:
        return "one rank has nothing to share"
    module = sys.modules.get("mcp_kernels.shm.process_group")
    pg: Any = _comm.resolve(group)
    backend = _comm.backend_name(pg, x)
    if module is None or backend != "shm":
        return f"the group's backend is {backend}, not shm"
    if len(pg.place.hosts) > 1:
        return f"the group's ranks stand on {len(pg.place.hosts)} hosts"
    if x.dtype not in FLOATS:
        return f"needs float32, float64, bfloat16 or float16, got {x.dtype}"
    return pg.workspaces.why_not(num_bytes)


def num_bytes(x: Tensor, columns: int) -> int:
    """Of a product of ``x [..., K]`` with ``columns`` out features."""
    return x.shape[:-1].numel() * columns * x.element_size()


def direct_group(group: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> LocalComm | None:
    """The shared memory of a group's ranks, where the body of an op may be called at once.

    That is where nobody could tell the call from the op's: no gradient, autocast, tracing, mode or
    subclass. Where a step decodes one row, its matmul takes 0.3 ms and evicts all else from the
    caches; what the dispatcher does in Python for an op then adds a fifth.
    """
    module = sys.modules.get("mcp_kernels.shm.process_group")
    if module is None:
        return None
    group = dist.group.WORLD if group is None else group
    if type(group) is not module.ShmProcessGroup or group.direct is None:
        return None
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return None
    if (
        type(x) not in _PLAIN
        or type(weight) not in _PLAIN
        or not x.is_cpu
        or x.dtype not in FLOATS
        or torch.compiler.is_compiling()
        or torch.is_autocast_enabled("cpu")
        or torch._C._len_torch_dispatch_stack()
        or _functorch.peek_interpreter_stack() is not None
    ):
        return None
    return group.direct


def workspace(group: str, num_bytes: int) -> Workspace | None:
    """The group's workspace; None where a rank has no room for it. All ranks call it together."""
    pg: Any = _comm.resolve(group)
    return pg.workspaces.of(num_bytes)


class Region(NamedTuple):
    """What a rank gets of a summed ``[M, N]``: ``height`` of each ``period`` rows, some columns."""

    period: int
    first: int
    height: int
    first_column: int
    num_columns: int


def part_along(shape: Sequence[int], dim: int, rank: int, world: int) -> Region:
    """This rank's part, along ``dim``, of a product ``[..., N]``."""
    *lead, columns = shape
    sizes = _comm.split_sizes(shape[dim], world)
    first = sum(sizes[:rank])
    if dim == len(lead):
        rows = torch.Size(lead).numel()
        return Region(rows, 0, rows, first, sizes[rank])
    inner = torch.Size(lead[dim + 1 :]).numel()
    return Region(lead[dim] * inner, first * inner, sizes[rank] * inner, 0, columns)


@functools.lru_cache(maxsize=1024)
def blocks_of(rows: int, columns: int, itemsize: int, slot_bytes: int) -> tuple[Block, ...]:
    """A product cut into blocks that fit a slot: as few and as even as that allows.

    One block where the product fits a slot whole. Else columns are cut first, down to
    ``_MIN_COLUMNS``, then rows.
    """
    limit = slot_bytes // itemsize
    width = columns
    if rows * columns > limit:
        width = _even(columns, max(min(columns, _MIN_COLUMNS), limit // rows), 64)
    height = _even(rows, max(1, limit // width), 1)
    return tuple(
        (row, min(height, rows - row), column, min(width, columns - column))
        for row in range(0, rows, height)
        for column in range(0, columns, width)
    )


def _even(size: int, most: int, step: int) -> int:
    """At most ``most``, a multiple of ``step`` where that allows it, in equal parts of ``size``."""
    parts = -(-size // most)
    even = -(-size // parts)
    return min(most, -(-even // step) * step)


class _Call:
    """A call of the workspace; any way out but the normal one is told to the peers."""

    __slots__ = ("_name", "_space")

    def __init__(self, space: Workspace, name: str) -> None:
        self._space = space
        self._name = name

    def __enter__(self) -> None:
        self._space.lock.acquire()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._space.lock.release()
        if kind is not None:
            space = self._space
            space.group.abort(f"{self._name} was interrupted on rank {space.rank}")


def sum_of_products(
    space: Workspace,
    name: str,
    pairs: Sequence[tuple[Tensor, Tensor]],
    region: Region | None,
    out: Tensor,
    bias: Tensor | None = None,
    meanwhile: Callable[[], None] | None = None,
    has_first: bool = False,
) -> Tensor:
    """``sum over ranks and pairs of a @ b``, plus ``bias`` once: this rank's region into ``out``.

    Args:
        space: of the group.
        name: of the op.
        pairs: ``[M, K_i]`` and ``[K_i, N]``, any strides; M and N equal on all ranks and not 0.
        region: of this rank; None on every rank is an all-reduce.
        out: contiguous ``[M / period * height, num_columns]``, written.
        bias: contiguous ``[N]``.
        meanwhile: runs once all products are published and before the last are summed.
        has_first: ``compute_first`` has run, since the workspace's call before.
    """
    (left, right), *more = pairs
    rows, columns, dtype = left.shape[0], right.shape[1], left.dtype
    blocks = blocks_of(rows, columns, dtype.itemsize, space.slot_bytes)
    _, height, _, width = blocks[0]
    in_stages = False
    if region is None:
        region = Region(rows, 0, rows, 0, columns)
        read_bytes = height * width * dtype.itemsize * (space.world - 1)
        in_stages = space.world > 2 and height >= space.world and read_bytes > _SHARE_BYTES
    shm = space.shm
    with _Call(space, name):
        slot = space.begin_sum(name, rows, columns, region, out, bias, in_stages)
        if len(blocks) == 1 and not more and meanwhile is None:
            torch.mm(left, right, out=space.slot(slot, dtype, rows, columns))
            shm.publish_whole()  # and all the rest, in one call
            return out
        for number, block in enumerate(blocks):
            if number > 0 or not has_first:
                _compute(space, slot if number == 0 else shm.next_slot(), block, pairs)
            shm.publish_sum(*block)
        if meanwhile is not None:
            meanwhile()
        shm.finish()
    return out


def compute_first(space: Workspace, slot: int, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """The first block of ``sum_of_products(pairs)``, ahead of its call, into the next slot."""
    (left, right), *_ = pairs
    blocks = blocks_of(left.shape[0], right.shape[1], left.dtype.itemsize, space.slot_bytes)
    _compute(space, slot, blocks[0], pairs)


def _compute(
    space: Workspace, slot: int, block: Block, pairs: Sequence[tuple[Tensor, Tensor]]
) -> None:
    row, height, column, width = block
    into = space.slot(slot, pairs[0][0].dtype, height, width)
    for number, (left, right) in enumerate(pairs):
        a, b = left[row : row + height], right[:, column : column + width]
        if number == 0:
            torch.mm(a, b, out=into)
        else:
            into.addmm_(a, b)


def gather_rows(
    space: Workspace,
    name: str,
    x: Tensor,
    dim: int,
    sizes: Sequence[int],
    multiply: Callable[[Tensor, int, int], None],
    meanwhile: Callable[[int], None] | None = None,
) -> Tensor:
    """The ranks' parts joined along ``dim``; rows are multiplied as they arrive.

    Args:
        space: of the group.
        name: of the op.
        x: this rank's part, any strides.
        dim: the dimension that is joined.
        sizes: of every rank's part along ``dim``.
        multiply: gets the joined ``[M, K]`` with the first and the last row plus one that it may
            read; all rows are covered, in blocks that depend on the shapes alone.
        meanwhile: runs once this rank's part is published, before the others' are waited for; gets
            the slot that the next call of the workspace begins with.

    Returns:
        The joined tensor, contiguous.
    """
    shape = [*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]]
    joined = x.new_empty(shape)
    rows = joined.view(torch.Size(shape[:-1]).numel(), shape[-1])
    outer, inner = torch.Size(shape[:dim]).numel(), torch.Size(shape[dim + 1 :]).numel()
    room = space.slot_bytes // x.element_size()
    num_pieces = -(-outer * inner * max(sizes) // room)
    if num_pieces == 0:
        assert meanwhile is None
        multiply(rows, 0, rows.shape[0])
        return joined
    # Rows of one rank stand together, and are enough for a matmul of their own.
    height = inner // shape[-1] if dim < x.dim() - 1 else 0
    by_rank = outer == 1 and height * max(sizes) >= _MIN_OWN_ROWS
    shm = space.shm
    with _Call(space, name):
        slot = space.begin_gather(name, outer, [inner * size for size in sizes], joined)
        for number, piece in enumerate(_pieces(x, num_pieces, room)):
            if number > 0:
                slot = shm.next_slot()
            if piece is not None:
                space.slot(slot, x.dtype, 1, piece.numel()).view(piece.shape).copy_(piece)
            shm.publish_piece()
        if meanwhile is not None:
            meanwhile(shm.next_slot())
        for distance in range(space.world if by_rank else 0):
            peer = (space.rank + distance) % space.world
            begin = height * sum(sizes[:peer])
            shm.take(peer)
            if sizes[peer]:
                multiply(rows, begin, begin + height * sizes[peer])
        shm.finish()
    if not by_rank:
        multiply(rows, 0, rows.shape[0])
    return joined


def _pieces(x: Tensor, count: int, room: int) -> Iterator[Tensor | None]:
    """``x`` in ``count`` pieces of ``room`` elements, the last ones shorter or None."""
    if count == 1:
        yield x if x.numel() else None  # of any strides: the copy into the slot follows them
        return
    flat = x.reshape(-1)
    for number in range(count):
        piece = flat[number * room : (number + 1) * room]
        yield piece if piece.numel() else None
