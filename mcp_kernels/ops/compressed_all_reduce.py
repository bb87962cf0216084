"""Mean over ranks of a flat tensor in a few bits an element, with error feedback on both sides.

All-to-all of codes, float32 reduce by the owner of each chunk, all-gather of new codes: two
collectives. What coding loses stays in ``worker_error`` (before sending) and ``server_error``
(after reducing) and is added to the next call's values, so that over time everything arrives::

    sum over calls of the result  +  mean over ranks of worker_error  +  server_error  =
    sum over calls of the mean of x

Source: Tang et al., "1-bit Adam" (ICML 2021), figure 3; the same two-hop shape with integer codes
is ZeRO++'s qgZ (arXiv 2306.10209).

Letters: N = elements, W = ranks, a chunk = ceil(N / W) elements of one rank (as ``torch.chunk``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mcp_kernels._transforms import is_batched
from mcp_kernels.ops import _comm
from mcp_kernels.ops._code_exchange import Chunks, CodeExchange
from mcp_kernels.ops._codec_checks import FLOAT_DTYPES
from mcp_kernels.ops._codecs import Codec, find_codec
from mcp_kernels.ops.host_groups import HostGroups

Group = dist.ProcessGroup | HostGroups | None


@dataclass(slots=True)
class ErrorState:
    """What earlier calls could not send, of one flat tensor on one rank; both updated in place."""

    worker_error: Tensor
    """Float32, this rank's part between the hosts: N elements without ``HostGroups``."""
    server_error: Tensor
    """Float32, this rank's own chunk of it."""

    @staticmethod
    def zeros(
        numel: int, group: Group = None, device: torch.device | str | None = None
    ) -> ErrorState:
        """The state before the first call of a flat tensor of ``numel`` elements."""
        world, rank = _place(group)
        if isinstance(group, HostGroups):
            numel = group.local_sizes(numel)[group.local_rank]
        server = _comm.split_sizes(numel, world)[rank]
        return ErrorState(torch.zeros(numel, device=device), torch.zeros(server, device=device))


def compressed_all_reduce(
    flat: Tensor,
    state: ErrorState,
    group: Group = None,
    codec: str | Codec = "onebit",
    op: Literal["avg", "sum"] = "avg",
    *,
    async_op: bool = False,
    block_size: int = 1024,
    out: Tensor | None = None,
) -> Tensor | CompressedWork:
    """Mean (or sum) over the ranks of ``flat``, in the codec's bits an element on the wire.

    Every rank gets the same bits. No gradient flows.

    Args:
        flat: float32, bfloat16 or float16, any shape, the same number of elements on every rank;
            unchanged.
        state: made by ``ErrorState.zeros(flat.numel(), group)``; updated in place.
        group: None is the world (or this process alone where torch.distributed is not set up);
            ``HostGroups`` sums in full precision inside each host and compresses between hosts.
        codec: "onebit", "int8", "int4" or "fp8".
        op: "avg", or "sum" = W times that.
        async_op: return at once with a ``CompressedWork``; ``wait`` gives the result.
        block_size: elements that share a scale, a positive multiple of 8.
        out: where the result goes, contiguous, of flat's shape, dtype and device; **written**. It
            may be ``flat`` itself, also with ``async_op``. Memory that is there already saves the
            system's work for new pages, which takes about as long as all the coding.

    Returns:
        ``out``, or a new tensor of flat's shape and dtype. A block that held a NaN or an infinity
        on some rank is NaN on every rank; its errors stay as they were where the bad value was.

    Raises:
        TypeError: ``flat`` or ``state`` has the wrong dtype.
        ValueError: another argument breaks its rule.

    Cost: an all-to-all and an all-gather, ``wire_bytes`` together; compress, reduce and decompress
        are one pass over memory each. Alone (W = 1) nothing is sent and the result is what one
        coding gives.
    """
    name = "compressed_all_reduce"
    codec = find_codec(name, codec)
    if op not in ("avg", "sum"):
        raise ValueError(f"{name}: op must be avg or sum, got {op!r}")
    if block_size <= 0 or block_size % 8:
        raise ValueError(
            f"{name}: block_size must be a positive multiple of 8, got {block_size}; use 1024"
        )
    if flat.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"{name}: flat must be float32, bfloat16 or float16, got {flat.dtype}; "
            "convert it by flat.float()"
        )
    if not torch.compiler.is_compiling() and is_batched(flat):
        raise ValueError(
            f"{name}: flat must not be mapped by torch.vmap, got one for each sample; "
            "reduce all samples as one flat tensor, or call in a loop"
        )
    _check_state(name, flat, state, group)
    if out is not None:
        _check_out(name, flat, out)
        out = out.detach()
    work = CompressedWork(flat.detach(), state, group, codec, op, block_size, out)
    return work if async_op else work.wait()


class CompressedWork:
    """A compressed all-reduce under way; every rank must finish its works in the same order."""

    def __init__(
        self,
        flat: Tensor,
        state: ErrorState,
        group: Group,
        codec: Codec,
        op: str,
        block_size: int,
        out: Tensor | None = None,
    ) -> None:
        self._out = out
        self._shape, self._dtype, self._numel = flat.shape, flat.dtype, flat.numel()
        self._hosts = group if isinstance(group, HostGroups) else None
        across = _across(group)
        world = 1 if across is None else across.size()
        ranks = world if self._hosts is None else world * self._hosts.num_local
        self._factor = float(ranks) if op == "sum" else 1.0
        mine = flat if self._hosts is None else self._hosts.mean_here(flat)
        self._chunks = Chunks(mine.numel(), world, block_size, codec)
        rows = compress_rows(mine, state.worker_error, self._chunks)
        self._exchange = CodeExchange(self._chunks, rows, state.server_error, across)
        self._result: Tensor | None = None

    def advance(self) -> None:
        """Wait for the all-to-all, reduce, start the all-gather; harmless when done before."""
        self._exchange.advance()

    def wait(self) -> Tensor:
        """The result, once it is here."""
        if self._result is None:
            out = self._out
            is_direct = out is not None and out.dtype == torch.float32 and self._hosts is None
            mean = _decompress_rows(self._exchange.wait(), self._chunks, out if is_direct else None)
            if self._factor != 1.0:
                mean *= self._factor
            if self._hosts is not None:
                mean = self._hosts.join(mean, self._numel)
            mean = mean.view(self._shape)
            if out is None:
                self._result = mean.to(self._dtype)
            else:
                self._result = out if is_direct else out.copy_(mean)
        return self._result


def compress_rows(x: Tensor, error: Tensor, chunks: Chunks) -> Tensor:
    """This rank's codes of every chunk, as rows to send; ``error`` is updated."""
    rows = torch.empty(chunks.world, chunks.row_bytes, dtype=torch.uint8, device=x.device)
    if chunks.numel == 0:
        return rows
    codec, block_size = chunks.codec, chunks.block_size
    if chunks.is_whole:
        chunks.write_all(rows, *codec.compress(x, error, block_size))
        return rows
    # Blocks start anew with every chunk, so that no scale belongs to two owners.
    parts = x.reshape(-1).split(chunks.step)
    errors = error.view(-1).split(chunks.step)
    rows.zero_()
    for row, part, part_error in zip(rows, parts, errors, strict=False):  # fewer than W: empty
        chunks.write(row, *codec.compress(part, part_error, block_size))
    return rows


def _decompress_rows(rows: Tensor, chunks: Chunks, out: Tensor | None) -> Tensor:
    """Float32 ``[N]`` from the gathered rows: ``out``, flat, where there is one."""
    codec, block_size = chunks.codec, chunks.block_size
    flat = torch.empty(chunks.numel, device=rows.device) if out is None else out.view(-1)
    if chunks.numel == 0:
        return flat
    if chunks.is_whole:
        codes, scales = chunks.read(rows, chunks.step)
        codec.decompress_into(codes.view(-1), scales.view(-1), block_size, flat)
        return flat
    # Fewer parts than ranks where the last chunks are empty.
    for index, part in enumerate(flat.split(chunks.step)):
        codes, scales = chunks.read(rows[index : index + 1], part.numel())
        codec.decompress_into(codes.view(-1), scales.view(-1), block_size, part)
    return flat


def _across(group: Group) -> dist.ProcessGroup | None:
    """The group that codes travel in; None for a single rank."""
    if isinstance(group, HostGroups):
        return group.across
    return _comm.resolve(_comm.group_name(group))


def _place(group: Group) -> tuple[int, int]:
    """(ranks, this rank) of the group that codes travel in."""
    across = _across(group)
    return (1, 0) if across is None else (across.size(), across.rank())


def _check_out(name: str, flat: Tensor, out: Tensor) -> None:
    if out.dtype != flat.dtype:
        raise TypeError(f"{name}: out must be {flat.dtype} as flat is, got {out.dtype}")
    if out.shape != flat.shape or out.device != flat.device or not out.is_contiguous():
        raise ValueError(
            f"{name}: out must be contiguous, {list(flat.shape)} on {flat.device}, got "
            f"{list(out.shape)} on {out.device}; make it by torch.empty(flat.shape)"
        )


def _check_state(name: str, flat: Tensor, state: ErrorState, group: Group) -> None:
    world, rank = _place(group)
    numel = flat.numel()
    if isinstance(group, HostGroups):
        numel = group.local_sizes(numel)[group.local_rank]
    sizes = {
        "worker_error": (state.worker_error, numel),
        "server_error": (state.server_error, _comm.split_sizes(numel, world)[rank]),
    }
    for field, (error, size) in sizes.items():
        if error.dtype != torch.float32:
            raise TypeError(f"{name}: {field} must be float32, got {error.dtype}")
        if error.numel() != size or not error.is_contiguous() or error.device != flat.device:
            raise ValueError(
                f"{name}: {field} must be {size} contiguous elements on {flat.device} on rank "
                f"{rank} of {world}, got {list(error.shape)} on {error.device}; "
                "make it by ErrorState.zeros or onebit_buffers"
            )
