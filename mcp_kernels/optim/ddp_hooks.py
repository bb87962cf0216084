"""Communication hooks for DDP: gradients averaged in 1, 4 or 8 bits an element, errors fed back.

    state = compress_ddp(ddp, codec="int8")       # or ddp.register_comm_hook(state, int8_hook)

Errors belong to parameters, by name: when DDP lays its buckets out anew (it does after the first
backward), they follow, the server's part by one exchange among the ranks. Blocks begin anew with
every parameter, so results don't depend on which bucket it is in, and a run that is resumed goes on
bit by bit. The exchanges of buckets overlap with backward; they are finished in bucket order, so
that all ranks agree on it.

1-bit Adam (``OneBitAdam``) is the better home for one bit: a sign of a gradient carries less than a
sign of a momentum. Here ``onebit`` is signSGD with error feedback before any optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mcp_kernels.ops import _comm
from mcp_kernels.ops._code_exchange import uncompressed_bytes, wire_bytes
from mcp_kernels.ops._codecs import INT4, INT8, ONEBIT, Codec, find_codec
from mcp_kernels.ops.block_layout import BlockLayout
from mcp_kernels.optim._blockwise_mean import BlockwiseMean
from mcp_kernels.optim._bucket_errors import BucketErrors

VERSION = 1


class CompressionState:
    """What the hooks keep between steps: the errors of every parameter.

    Args:
        ddp: the model; its parameters' names are the keys.
        block_size: elements that share a scale, a positive multiple of 8.
        start_step: backward passes that are averaged in full before compression starts, so that
            the first large gradients leave no error behind.
    """

    def __init__(
        self, ddp: DistributedDataParallel, *, block_size: int = 1024, start_step: int = 0
    ) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(
                "CompressionState: ddp must be a DistributedDataParallel, got "
                f"{type(ddp).__name__}; wrap the model first"
            )
        if block_size <= 0 or block_size % 8:
            raise ValueError(
                f"CompressionState: block_size must be a positive multiple of 8, got {block_size}"
            )
        if start_step < 0:
            raise ValueError(f"CompressionState: start_step must be >= 0, got {start_step}")
        self.group = _comm.resolve(_comm.group_name(ddp.process_group))
        self.block_size, self.start_step = block_size, start_step
        self.steps = 0
        """Backward passes that were synchronised."""
        self.bytes_sent = self.uncompressed_bytes = 0
        """By this rank in the last complete pass, and what float32 would have taken."""
        self._names = {param: name for name, param in ddp.module.named_parameters()}
        self.errors = BucketErrors(self.group)
        self._flying: list[_Flight] = []
        self._counting = (0, 0)

    def run(self, codec: Codec, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """The hook: average ``bucket`` over the ranks."""
        buffer = bucket.buffer()
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=_devices(buffer))
        self._flying.append(self._start(codec, bucket, future))
        if len(self._flying) > 1:
            self._flying[-2].advance()
        if bucket.is_last():
            for flight in self._flying:
                flight.finish()
            self._flying = []
            self.steps += 1
            (self.bytes_sent, self.uncompressed_bytes), self._counting = self._counting, (0, 0)
        return future

    def _start(
        self, codec: Codec, bucket: dist.GradBucket, future: torch.futures.Future[Tensor]
    ) -> _Flight:
        buffer, params = bucket.buffer(), bucket.parameters()
        world = 1 if self.group is None else self.group.size()
        layout = BlockLayout([p.numel() for p in params], self.block_size, world)
        plain = uncompressed_bytes(buffer.numel(), world)
        is_full = self.steps < self.start_step
        sent = plain
        if not is_full:
            sent = wire_bytes(layout.padded_numel, world, codec, self.block_size)
        self._counting = (self._counting[0] + sent, self._counting[1] + plain)
        if self.group is None:
            return _Flight(buffer, future)
        if is_full:
            buffer.div_(world)
            work = self.group.allreduce([buffer], dist.AllreduceOptions())
            return _Flight(buffer, future, plain=work)
        errors = self.errors.of_bucket([self._names[p] for p in params], layout, buffer.device)
        mean = BlockwiseMean(bucket.gradients(), layout, errors, self.group, codec)
        return _Flight(buffer, future, coded=mean)

    def state_dict(self) -> dict[str, Any]:
        """This rank's errors, by bucket with its parameters' names; each rank saves its own."""
        return {
            "version": VERSION,
            "world_size": 1 if self.group is None else self.group.size(),
            "rank": 0 if self.group is None else self.group.rank(),
            "block_size": self.block_size,
            "steps": self.steps,
            **self.errors.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of this rank; buckets may be laid out differently by now.

        Raises:
            ValueError: it is of another rank or number of ranks; ``reshard_hook_states`` moves it.
        """
        world, rank = (1, 0) if self.group is None else (self.group.size(), self.group.rank())
        own = {"version": VERSION, "world_size": world, "rank": rank, "block_size": self.block_size}
        for key, mine in own.items():
            if state.get(key) != mine:
                raise ValueError(
                    f"CompressionState.load_state_dict: {key} must be {mine}, got "
                    f"{state.get(key)}; use reshard_hook_states for another number of ranks"
                )
        self.steps = state["steps"]
        self.errors.load_state_dict(state)


class _Flight:
    """One bucket on its way."""

    def __init__(
        self,
        buffer: Tensor,
        future: torch.futures.Future[Tensor],
        *,
        coded: BlockwiseMean | None = None,
        plain: dist.Work | None = None,
    ) -> None:
        self._buffer, self._future = buffer, future
        self._coded, self._plain = coded, plain

    def advance(self) -> None:
        if self._coded is not None:
            self._coded.advance()

    def finish(self) -> None:
        if self._coded is not None:
            self._coded.finish()
        if self._plain is not None:
            self._plain.wait()
        self._future.set_result(self._buffer)


def onebit_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP hook: one bit an element, 1/31 of float32's bytes."""
    return state.run(ONEBIT, bucket)


def int8_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP hook: 8 bits an element, 1/4 of float32's bytes."""
    return state.run(INT8, bucket)


def int4_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP hook: 4 bits an element, 1/8 of float32's bytes."""
    return state.run(INT4, bucket)


_HOOKS = {"onebit": onebit_hook, "int8": int8_hook, "int4": int4_hook}
for _hook in _HOOKS.values():
    # DDP looks at the annotations themselves, which the import at the top made strings.
    _hook.__annotations__.update(bucket=dist.GradBucket, **{"return": torch.futures.Future[Tensor]})


def compress_ddp(
    ddp: DistributedDataParallel,
    codec: Literal["onebit", "int8", "int4"] = "int8",
    *,
    block_size: int = 1024,
    start_step: int = 0,
) -> CompressionState:
    """Make ``ddp`` average its gradients in the codec's bits; returns the state, to be saved.

    Raises:
        TypeError: ``ddp`` is something else.
        ValueError: an argument breaks its rule.

    Cost: two collectives a bucket; 4 + 4 / W bytes of errors a parameter.
    """
    if codec not in _HOOKS:
        raise ValueError(f"compress_ddp: codec must be one of {', '.join(_HOOKS)}, got {codec!r}")
    find_codec("compress_ddp", codec)
    state = CompressionState(ddp, block_size=block_size, start_step=start_step)
    ddp.register_comm_hook(state, _HOOKS[codec])
    return state


def reshard_hook_states(
    states: Sequence[Mapping[str, Any]], world_size: int, rank: int
) -> dict[str, Any]:
    """The state of one of ``world_size`` ranks from those of all ranks of another run, in order.

    What the errors hold is conserved: every rank gets the mean of the worker errors, the server's
    are cut anew.

    Raises:
        ValueError: ``states`` are not of all ranks of one run, or ``rank`` is out of range.
    """
    ranks = [state["rank"] for state in states]
    if not states or ranks != list(range(states[0]["world_size"])):
        raise ValueError(f"reshard_hook_states: states must be of all ranks in order, got {ranks}")
    if not 0 <= rank < world_size:
        raise ValueError(f"reshard_hook_states: rank must be in [0, {world_size - 1}], got {rank}")
    return {
        **states[0],
        "world_size": world_size,
        "rank": rank,
        **BucketErrors.reshard(states, states[0]["block_size"], world_size, rank),
    }


def _devices(buffer: Tensor) -> list[int | str | torch.device] | None:
    return [buffer.device] if buffer.is_cuda else None


__all__ = [
    "CompressionState",
    "compress_ddp",
    "int4_hook",
    "int8_hook",
    "onebit_hook",
    "reshard_hook_states",
]
