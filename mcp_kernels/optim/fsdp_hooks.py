"""Codecs for FSDP2 and hybrid sharding, where 1-bit Adam itself does not fit.

``fully_shard`` leaves each rank a slice of gradient, momentum and parameters; 1-bit Adam needs all
of each rank's own momentum and error. What can be compressed there is what still travels:

- the reduce-scatter of gradients (``compress_reduce_scatter``, int8, int4 or fp8): half of the
  gradient traffic, on the links of the sharding group;
- the all-reduce of gradient slices over replicas (``compress_replicas``, any codec): hybrid
  sharding with full precision inside a host and bits between hosts.

Both are seats that FSDP2 offers: ``set_custom_reduce_scatter`` and ``set_all_reduce_hook``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mcp_kernels.ops import _comm
from mcp_kernels.ops._code_exchange import Chunks, CodeExchange
from mcp_kernels.ops._codecs import Codec, find_codec
from mcp_kernels.ops.compressed_all_reduce import ErrorState, compress_rows, compressed_all_reduce

Errors = dict[str, list[Tensor]]


class FsdpCompression:
    """The errors of all modules that were compressed by one call, by module name."""

    def __init__(self, parts: Mapping[str, CompressedReduceScatter | ReplicaAllReduce]) -> None:
        self.parts = dict(parts)

    def state_dict(self) -> dict[str, list[Tensor]]:
        """This rank's errors by module; every rank saves its own."""
        return {name: [t.clone() for t in part.tensors()] for name, part in self.parts.items()}

    def load_state_dict(self, state: Mapping[str, list[Tensor]]) -> None:
        """Continue from the errors of this rank at the same layout.

        Raises:
            ValueError: modules differ.
        """
        if set(state) != set(self.parts):
            raise ValueError(
                f"FsdpCompression.load_state_dict: modules must be {sorted(self.parts)}, got "
                f"{sorted(state)}"
            )
        for name, tensors in state.items():
            self.parts[name].load([tensor.clone() for tensor in tensors])


class CompressedReduceScatter:
    """FSDP2's ``ReduceScatter``: every rank's slice travels in codes and is averaged in float32.

    One collective, an all-to-all. Nothing is coded a second time, so there is no server error.

    Args:
        codec: of the slices.
        block_size: elements that share a scale.
        feeds_back: keep what coding loses (4 bytes for each whole, unsharded parameter).
    """

    def __init__(self, codec: Codec, block_size: int, *, feeds_back: bool) -> None:
        self.codec, self.block_size, self.feeds_back = codec, block_size, feeds_back
        self.worker_error: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """The worker's error, once there is one."""
        return [] if self.worker_error is None else [self.worker_error]

    def load(self, tensors: list[Tensor]) -> None:
        """Take over what ``tensors`` gave."""
        self.worker_error = tensors[0] if tensors else None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for FSDP2's buffers."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """This rank's slice of the mean or sum of ``input_tensor`` over ``group``."""
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise ValueError(
                f"CompressedReduceScatter: op must be avg or sum, got {op}; call "
                "set_force_sum_reduction_for_comms(True) on the module"
            )
        world = group.size()
        error = self.worker_error
        if error is None or error.numel() != input_tensor.numel():
            error = torch.zeros(input_tensor.numel(), device=input_tensor.device)
        chunks = Chunks(input_tensor.numel(), world, self.block_size, self.codec)
        rows = compress_rows(input_tensor, error, chunks)
        self.worker_error = error if self.feeds_back else None
        received = CodeExchange(chunks, rows, error[:0], group).receive()
        codes, scales = chunks.read(received, chunks.step)
        total = torch.zeros(chunks.step, device=input_tensor.device)
        for rank in range(world):
            total += self.codec.decompress(codes[rank], scales[rank], chunks.step, self.block_size)
        if op == dist.ReduceOp.AVG:
            total /= world
        output_tensor.copy_(total)
        return None


class ReplicaAllReduce:
    """FSDP2's all-reduce hook: a gradient slice becomes its mean over the replicas, in codes."""

    def __init__(self, codec: Codec, block_size: int, group: dist.ProcessGroup | None) -> None:
        self.codec, self.block_size, self.group = codec, block_size, group
        self.errors: ErrorState | None = None

    def tensors(self) -> list[Tensor]:
        """Both errors, once there are any."""
        return [] if self.errors is None else [self.errors.worker_error, self.errors.server_error]

    def load(self, tensors: list[Tensor]) -> None:
        """Take over what ``tensors`` gave."""
        self.errors = ErrorState(*tensors) if tensors else None

    def __call__(self, reduce_output: Tensor) -> None:
        """Average in place."""
        if self.group is None:
            return
        if self.errors is None:
            self.errors = ErrorState.zeros(reduce_output.numel(), self.group, reduce_output.device)
        how = {"block_size": self.block_size, "out": reduce_output}
        compressed_all_reduce(reduce_output, self.errors, self.group, self.codec, **how)


def compress_reduce_scatter(
    model: nn.Module,
    codec: str = "int8",
    *,
    block_size: int = 1024,
    error_feedback: bool = True,
) -> FsdpCompression:
    """Compress the gradient reduce-scatter of every ``fully_shard``-ed module of ``model``.

    Args:
        model: after ``fully_shard``.
        codec: "int8", "int4" or "fp8".
        block_size: elements that share a scale, a positive multiple of 8.
        error_feedback: keep the errors; they take 4 bytes for each whole parameter on each rank.

    Returns:
        The errors, to be saved with the model.

    Raises:
        ValueError: no module is sharded, or the codec is "onebit": signs of gradients alone need
            the momentum that 1-bit Adam has, and its memory.
    """
    found = find_codec("compress_reduce_scatter", codec)
    if found.name == "onebit":
        raise ValueError(
            "compress_reduce_scatter: codec must be int8, int4 or fp8, got 'onebit'; one bit "
            "needs the whole momentum of OneBitAdam (zero=0 or 1)"
        )
    parts: dict[str, CompressedReduceScatter | ReplicaAllReduce] = {}
    for name, module in _sharded(model, "compress_reduce_scatter"):
        part = CompressedReduceScatter(found, block_size, feeds_back=error_feedback)
        module.set_custom_reduce_scatter(part)  # pyright: ignore[reportArgumentType]
        parts[name] = part
    return FsdpCompression(parts)


def compress_replicas(
    model: nn.Module,
    group: dist.ProcessGroup | None,
    codec: str = "onebit",
    *,
    block_size: int = 1024,
) -> FsdpCompression:
    """Average gradient slices over replicas in codes: hybrid sharding for slow links.

    The model is sharded over a 1-D mesh (the ranks of a host); ``group`` holds the ranks with this
    one's slice on the other hosts. Replicas must start from equal parameters.

    Args:
        model: after ``fully_shard`` over the sharding ranks alone.
        group: the replicas of this rank.
        codec: any.
        block_size: elements that share a scale, a positive multiple of 8.

    Returns:
        The errors, to be saved with the model.

    Raises:
        ValueError: no module is sharded, or the codec is unknown.
    """
    found = find_codec("compress_replicas", codec)
    resolved = _comm.resolve(_comm.group_name(group))
    parts: dict[str, CompressedReduceScatter | ReplicaAllReduce] = {}
    for name, module in _sharded(model, "compress_replicas"):
        part = ReplicaAllReduce(found, block_size, resolved)
        device = next(iter(module.parameters())).device  # pyright: ignore[reportAttributeAccessIssue]
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        module.set_all_reduce_hook(part, stream=stream)
        parts[name] = part
    return FsdpCompression(parts)


def _sharded(model: nn.Module, op: str) -> Iterator[tuple[str, FSDPModule]]:
    """Modules that ``fully_shard`` was called on, by name."""
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, FSDPModule)]
    if not found:
        raise ValueError(f"{op}: model must be sharded, got none; call fully_shard first")
    yield from found
