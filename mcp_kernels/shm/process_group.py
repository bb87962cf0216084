"""The calls of torch.distributed's process group, answered from shared memory.

torch lets a backend in Python only replace the whole process group, so this class answers every
call of one itself; tensors on other devices go to a backend that it registers for them, NCCL for
CUDA. Some calls have an old and a new name in torch 2.10 to 2.13; both are here.
"""

# torch's stubs give names to arguments of calls that it only ever makes by position.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false
from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from mcp_kernels.shm.base import ShmGroupBase, ShmOptions
from mcp_kernels.shm.local import ANY_RANK
from mcp_kernels.shm.tensors import check_like
from mcp_kernels.shm.work import DoneWork
from mcp_kernels.spans import communicates

_SUM = dist.ReduceOp.SUM


class ShmProcessGroup(ShmGroupBase):
    """A process group whose CPU tensors travel through shared memory.

    Made by torch.distributed, see the package. Arguments and results are those of
    ``ProcessGroup``; ``opts`` may be torch's options, or the reduction or root alone.
    """

    # --- reductions -----------------------------------------------------------------------------

    @communicates("all_reduce")
    def allreduce(self, tensors: Any, opts: Any = _SUM) -> Any:
        """Reduce one tensor over the ranks, in place."""
        xs = tensors if type(tensors) is list else _listed(tensors)
        if not xs[0].is_cpu:
            return self._elsewhere(xs[0], "allreduce", tensors, opts)
        try:
            op, is_async = opts.reduceOp, opts.asyncOp
        except AttributeError:  # the reduction alone
            op, is_async = opts, True
        for x in xs:
            self._comm.all_reduce(x, op)
        # A caller that does not wait for a future gets the one work that is always done: 0.6 us.
        return DoneWork(xs) if is_async else self._done

    @communicates("all_reduce")
    def allreduce_coalesced(self, tensors: Any, opts: Any = _SUM) -> Any:
        """Reduce several tensors over the ranks, in place."""
        xs = _listed(tensors)
        if not xs[0].is_cpu:
            return self._elsewhere(xs[0], "allreduce_coalesced", tensors, opts)
        return self.allreduce(xs, opts)

    @communicates("reduce")
    def reduce(self, tensors: Any, opts: Any = None, op: Any = _SUM) -> Any:
        """Reduce one tensor into the root's; ``reduce(x, root, op)`` is the short form."""
        xs = _listed(tensors)
        if not xs[0].is_cpu:
            return self._elsewhere(xs[0], "reduce", tensors, opts)
        root, op = (opts.rootRank, opts.reduceOp) if hasattr(opts, "rootRank") else (opts, op)
        self._comm.reduce(xs[0], op, root)
        return DoneWork(xs)

    @communicates("reduce_scatter")
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = _SUM) -> Any:
        """Rank r's tensor of each rank's list, reduced, into rank r's output."""
        outs = _listed(outputs)
        if not outs[0].is_cpu:
            return self._elsewhere(outs[0], "reduce_scatter", outputs, inputs, opts)
        rows = inputs[0] if isinstance(inputs[0], (list, tuple)) else inputs
        out = outs[0]
        if len(rows) != self.size():
            raise ValueError(
                f"reduce_scatter: inputs must be {self.size()} tensors, got {len(rows)}"
            )
        for row in rows:
            check_like("reduce_scatter", "each input", row, out.numel(), out.dtype)
        packed = torch.cat([row.detach().reshape(-1) for row in rows])
        return self._reduce_scatter_base(out, packed, opts)

    @communicates("reduce_scatter")
    def _reduce_scatter_base(self, output: Tensor, packed: Tensor, opts: Any = _SUM) -> Any:
        """Row r of each rank's ``packed`` [W, ...], reduced, into rank r's output [...]."""
        if not output.is_cpu:
            return self._elsewhere(output, "_reduce_scatter_base", output, packed, opts)
        numel = output.numel() * self.size()
        check_like("reduce_scatter", "input", packed, numel, output.dtype)
        op = opts.reduceOp if hasattr(opts, "reduceOp") else opts
        self._comm.reduce_scatter(output, packed, op)
        return DoneWork([output])

    reduce_scatter_single = _reduce_scatter_base

    @communicates("reduce_scatter")
    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = _SUM
    ) -> Any:
        """``_reduce_scatter_base`` of several pairs."""
        if outputs and not outputs[0].is_cpu:
            call = "reduce_scatter_tensor_coalesced"
            return self._elsewhere(outputs[0], call, outputs, inputs, opts)
        for output, packed in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, packed, opts)
        return DoneWork(outputs)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    # --- copies ---------------------------------------------------------------------------------

    @communicates("all_gather")
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Each rank's tensor into that rank's place in everyone's list."""
        xs = _listed(inputs)
        if not xs[0].is_cpu:
            return self._elsewhere(xs[0], "allgather", outputs, inputs, _or(opts, AllgatherOptions))
        rows = outputs[0] if isinstance(outputs[0], (list, tuple)) else outputs
        self._gather_rows("all_gather", rows, xs[0])
        return DoneWork(rows)

    @communicates("all_gather")
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """``allgather`` of several tensors; ``outputs[r]`` is the list from rank r."""
        for index, x in enumerate(inputs):
            self._gather_rows("all_gather", [row[index] for row in outputs], x)
        return DoneWork([x for row in outputs for x in row])

    def _gather_rows(self, op: str, rows: Sequence[Tensor], x: Tensor) -> None:
        if len(rows) != self.size():
            raise ValueError(f"{op}: outputs must be {self.size()} tensors, got {len(rows)}")
        for row in rows:
            check_like(op, "each output", row, x.numel(), x.dtype)
        self._comm.all_gather(rows, x)

    @communicates("all_gather")
    def _allgather_base(self, packed: Tensor, x: Tensor, opts: Any = None) -> Any:
        """Each rank's tensor [...] into its row of everyone's ``packed`` [W, ...]."""
        if not x.is_cpu:
            return self._elsewhere(x, "_allgather_base", packed, x, _or(opts, AllgatherOptions))
        check_like("all_gather", "output", packed, x.numel() * self.size(), x.dtype)
        self._comm.all_gather_packed(packed, x)
        return DoneWork([packed])

    all_gather_single = _allgather_base

    @communicates("all_gather")
    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        """``_allgather_base`` of several pairs."""
        if inputs and not inputs[0].is_cpu:
            call = "allgather_into_tensor_coalesced"
            return self._elsewhere(inputs[0], call, outputs, inputs, _or(opts, AllgatherOptions))
        for packed, x in zip(outputs, inputs, strict=True):
            self._allgather_base(packed, x)
        return DoneWork(outputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    @communicates("broadcast")
    def broadcast(self, tensors: Any, opts: Any = 0) -> Any:
        """The root's tensor into everyone's."""
        xs = _listed(tensors)
        if not xs[0].is_cpu:
            return self._elsewhere(xs[0], "broadcast", tensors, opts)
        root = opts.rootRank if hasattr(opts, "rootRank") else opts
        for x in xs:
            self._comm.broadcast(x, root)
        return DoneWork(xs)

    @communicates("scatter")
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Rank p's tensor of the root's list into rank p's output."""
        out = _listed(outputs)[0]
        if not out.is_cpu:
            return self._elsewhere(out, "scatter", outputs, inputs, opts)
        root = opts.rootRank if hasattr(opts, "rootRank") else opts
        rows = _own_rows("scatter", "inputs", inputs, self.rank() == root, self.size())
        for row in rows:
            check_like("scatter", "each input", row, out.numel(), out.dtype)
        self._comm.scatter(out, rows, root)
        return DoneWork([out])

    @communicates("gather")
    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Rank p's tensor into place p of the root's list."""
        x = _listed(inputs)[0]
        if not x.is_cpu:
            return self._elsewhere(x, "gather", outputs, inputs, opts)
        root = opts.rootRank if hasattr(opts, "rootRank") else opts
        rows = _own_rows("gather", "outputs", outputs, self.rank() == root, self.size())
        for row in rows:
            check_like("gather", "each output", row, x.numel(), x.dtype)
        self._comm.gather(rows, x, root)
        return DoneWork(rows)

    @communicates("all_to_all")
    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        """``inputs[p]`` goes to rank p, ``outputs[p]`` comes from it."""
        if not inputs[0].is_cpu:
            return self._elsewhere(
                inputs[0], "alltoall", outputs, inputs, _or(opts, AllToAllOptions)
            )
        if len(outputs) != self.size() or len(inputs) != self.size():
            raise ValueError(
                f"all_to_all: inputs and outputs must be {self.size()} tensors each, got "
                f"{len(inputs)} and {len(outputs)}"
            )
        self._comm.all_to_all(outputs, inputs)
        return DoneWork(outputs)

    @communicates("all_to_all")
    def alltoall_base(
        self,
        output: Tensor,
        packed: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> Any:
        """As ``alltoall`` on rows of one tensor; without sizes the rows are cut evenly."""
        if not packed.is_cpu:
            args = (output, packed, output_sizes, input_sizes, _or(opts, AllToAllOptions))
            return self._elsewhere(packed, "alltoall_base", *args)
        target = output if output.is_contiguous() else output.detach().contiguous()
        outs = _cut("output", target, output_sizes, self.size())
        ins = _cut("input", packed.detach().contiguous(), input_sizes, self.size())
        self._comm.all_to_all(outs, ins)
        if target is not output:
            output.detach().copy_(target)
        return DoneWork([output])

    all_to_all_single = alltoall_base

    # --- the rest -------------------------------------------------------------------------------

    @communicates("barrier")
    def barrier(self, opts: Any = None) -> Any:
        """Return when every rank has called it."""
        self._comm.barrier()
        return self._done

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier with a timeout of its own; the error names a rank that did not come."""
        usual = self._timeout
        self.set_timeout(timeout or usual)
        try:
            self._comm.barrier()
        finally:
            self.set_timeout(usual)

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        """Post one tensor to ``peer``; complete when its bytes have left."""
        x = _listed(tensors)[0]
        if not x.is_cpu:
            return self._elsewhere(x, "send", tensors, peer, tag)
        return self._comm.send(x, peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        """Post a receive of one tensor from ``peer``."""
        x = _listed(tensors)[0]
        if not x.is_cpu:
            return self._elsewhere(x, "recv", tensors, peer, tag)
        return self._comm.receive(x, peer, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Post a receive of one tensor from whoever sends first."""
        return self._comm.receive(_listed(tensors)[0], ANY_RANK, tag)


def create_process_group(arguments: Any, options: ShmOptions | None) -> ShmProcessGroup:
    """What torch.distributed calls to make a group; sub-groups take the world's options."""
    world = dist.group.WORLD
    crowd = 0
    if isinstance(world, ShmProcessGroup):
        crowd = len(world.place.local_ranks)
        options = options or world.shm_options
    return ShmProcessGroup(
        arguments.store,
        arguments.group_rank,
        arguments.group_size,
        arguments.timeout,
        name=arguments.group_id,
        options=options if isinstance(options, ShmOptions) else None,
        crowd=crowd,
    )


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _or(opts: Any, kind: Any) -> Any:
    return kind() if opts is None else opts


def _own_rows(op: str, name: str, lists: Any, is_root: bool, size: int) -> list[Tensor]:
    """The root's list of one tensor a rank; nothing elsewhere."""
    if not is_root:
        return []
    rows = lists[0] if lists and isinstance(lists[0], (list, tuple)) else lists
    if len(rows) != size:
        raise ValueError(f"{op}: {name} must be {size} tensors on the root, got {len(rows)}")
    return list(rows)


def _cut(name: str, x: Tensor, sizes: Sequence[int], parts: int) -> list[Tensor]:
    rows = x.shape[0] if x.dim() else 0
    if not sizes:
        if rows % parts:
            raise ValueError(
                f"all_to_all: {name} must have a first dimension that {parts} divides, got {rows}; "
                "give split sizes"
            )
        sizes = [rows // parts] * parts
    if len(sizes) != parts or sum(sizes) != rows:
        raise ValueError(
            f"all_to_all: {name} split sizes must be {parts} that add up to {rows}, got {sizes}"
        )
    return list(x.split(list(sizes)))
