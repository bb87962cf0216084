"""Mean over ranks of a list of tensors in codes, each tensor in blocks of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mcp_kernels.ops._code_exchange import Chunks, CodeExchange
from mcp_kernels.ops._codecs import ONEBIT, Codec
from mcp_kernels.ops.block_layout import BlockLayout
from mcp_kernels.ops.compressed_all_reduce import ErrorState
from mcp_kernels.ops.onebit_compress_momentum import onebit_compress_momentum


class BlockwiseMean:
    """The all-to-all starts here; ``advance`` starts the all-gather, ``finish`` writes the means.

    Args:
        tensors: averaged in place by ``finish``.
        layout: of ``tensors``, for the ranks of ``group``.
        errors: of the layout's whole buffer and of this rank's chunk of it, updated.
        group: two ranks or more.
        codec: of the wire.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        layout: BlockLayout,
        errors: ErrorState,
        group: dist.ProcessGroup,
        codec: Codec,
    ) -> None:
        self._tensors, self._layout = tensors, layout
        world, rank, block = group.size(), group.rank(), layout.block_size
        chunks = Chunks(layout.padded_numel, world, block, codec)
        device = errors.worker_error.device
        counts = layout.counts(device)[rank * layout.chunk_blocks :][: layout.chunk_blocks]
        rows = torch.empty(world, chunks.row_bytes, dtype=torch.uint8, device=device)
        chunks.write_all(rows, *self._compress(errors.worker_error, codec))
        self._exchange = CodeExchange(
            chunks, rows, errors.server_error, group, counts=counts.contiguous()
        )

    def _compress(self, error: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
        layout = self._layout
        if codec is ONEBIT:  # a sign has no zero, so padding must be left out
            bits = torch.zeros(layout.padded_numel // 8, dtype=torch.uint8, device=error.device)
            scales = torch.zeros(layout.num_blocks, device=error.device)
            return onebit_compress_momentum(
                self._tensors, bits, scales, error, beta1=0.0, block_size=layout.block_size
            )
        flat = torch.zeros(layout.padded_numel, device=error.device)
        for tensor, at in zip(self._tensors, layout.offsets, strict=True):
            flat[at : at + tensor.numel()].view_as(tensor).copy_(tensor)
        return codec.compress(flat, error, layout.block_size)

    def advance(self) -> None:
        """Wait for the all-to-all, reduce, start the all-gather."""
        self._exchange.advance()

    def finish(self) -> None:
        """Wait for the means and put them into the tensors."""
        chunks, layout = self._exchange.chunks, self._layout
        codec, block = chunks.codec, layout.block_size
        codes, scales = (t.view(-1) for t in chunks.read(self._exchange.wait(), chunks.step))
        for tensor, at, blocks in zip(self._tensors, layout.offsets, layout.blocks, strict=True):
            numel, first = tensor.numel(), codec.code_bytes(at)
            part = codes[first : first + codec.code_bytes(numel)]
            part_scales = scales[at // block : at // block + blocks]
            if tensor.dtype == torch.float32 and tensor.is_contiguous():
                codec.decompress_into(part, part_scales, block, tensor)
            else:
                tensor.copy_(codec.decompress(part, part_scales, numel, block).view_as(tensor))
