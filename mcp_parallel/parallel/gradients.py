"""From each rank's raw gradients to the gradient of the whole batch.

Micro-batch losses are divided by the global number of tokens before backward, so everything here
is a plain sum, in fp32 where the model computes in 16 bits: over micro-batches, over tp for weights
that saw a part of the sequence only, over dp and cp together, as one group, for replicated
parameters (``fully_shard`` does its own), over the two holders of a tied embedding. Sums commute,
so their order is free; each sum over ranks runs once a step, on flat buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mcp_kernels.spans import communication
from mcp_parallel.parallel.mesh import DATA, Mesh
from mcp_parallel.parallel.parallelize import Stage
from mcp_parallel.parallel.shards import Shard, is_sharded, like_parameter, local_part

# Size of an all-reduce: large enough to run at full bandwidth, small enough that the first starts
# while backward still runs. 25 MB is what DDP found to be a good default.
BUCKET_BYTES = 25 * 2**20


class GradientBuckets:
    """Replicated gradients in flat buffers, summed over a group while backward goes on.

    Autograd makes and accumulates gradients where it likes; on the step's last backward each one
    is copied into its bucket as it arrives and ``grad`` becomes the view of it. That is one pass
    less over the gradients than accumulating into zeroed views. Buckets hold parameters in reverse
    order of registration, which is about the order in which gradients appear, and are launched
    strictly in that order, so all ranks agree.

    A gradient of a 16-bit parameter is added to its bucket after each backward and freed, so the
    sum over micro-batches is fp32 like that over ranks.

    Args:
        parameters: in the order of registration.
        group: the ranks to sum over; None sums over micro-batches alone.
        masters: fp32 values of the 16-bit parameters; each gets its part of a bucket as ``grad``.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup | None,
        masters: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> None:
        self.group = group
        self._masters = masters or {}
        self.buffers: list[Tensor] = []
        self._buckets: list[list[_Slot | _NarrowSlot]] = []
        self._waiting: list[int] = []  # gradients still missing in each bucket
        self._works: list[dist.Work | None] = []
        self._armed = False
        self._hooks: list[RemovableHandle] = []
        for bucket in _fill_buckets(list(reversed(parameters))):
            self._add(bucket)

    def _add(self, bucket: list[nn.Parameter]) -> None:
        index = len(self.buffers)
        locals_ = [self._masters.get(p, local_part(p.detach())) for p in bucket]
        buffer = torch.zeros(
            sum(t.numel() for t in locals_), dtype=locals_[0].dtype, device=bucket[0].device
        )
        slots, start = [], 0
        for parameter, local in zip(bucket, locals_, strict=True):
            view = buffer[start : start + local.numel()].view_as(local)
            start += local.numel()
            if parameter in self._masters:
                local.grad = view
                slots.append(_NarrowSlot(parameter, view))
            else:
                slots.append(_Slot(parameter, view, like_parameter(parameter, view)))
            hook = parameter.register_post_accumulate_grad_hook(
                lambda _, slot=slots[-1]: self._arrived(index, slot)
            )
            self._hooks.append(hook)
        self.buffers.append(buffer)
        self._buckets.append(slots)

    def zero(self) -> None:
        """Forget the last step's gradients."""
        for slots in self._buckets:
            for slot in slots:
                slot.clear()

    def release(self) -> None:
        """Leave gradients to autograd for good, and give the buffers' memory back."""
        for hook in self._hooks:
            hook.remove()
        self.zero()
        self.buffers, self._buckets, self._hooks = [], [], []

    def arm(self) -> None:
        """Say that the next backward is the step's last: full buckets are sent from here on."""
        self._armed = True
        self._waiting = [len(slots) for slots in self._buckets]

    def _arrived(self, index: int, slot: _Slot | _NarrowSlot) -> None:
        slot.add()
        if not self._armed:
            return
        slot.take()
        self._waiting[index] -= 1
        while len(self._works) < len(self.buffers) and self._waiting[len(self._works)] == 0:
            self._launch()

    def _launch(self) -> None:
        if self.group is None:
            self._works.append(None)
            return
        with communication("sum of a gradient bucket"):
            work = dist.all_reduce(self.buffers[len(self._works)], group=self.group, async_op=True)
        self._works.append(cast("dist.Work", work))

    def finish(self) -> None:
        """Send what was not sent yet and wait for all of it."""
        while len(self._works) < len(self.buffers):
            for slot in self._buckets[len(self._works)]:
                slot.take()
            self._launch()
        with communication("wait for gradients"):
            for work in self._works:
                if work is not None:
                    work.wait()
        self._works.clear()
        self._armed = False


@dataclass(frozen=True)
class _Slot:
    """A parameter and its place in a bucket."""

    parameter: nn.Parameter
    view: Tensor
    """This rank's part of the gradient."""
    as_grad: Tensor
    """The view in the parameter's layout."""

    def clear(self) -> None:
        """Forget the last step's gradient."""
        self.parameter.grad = None

    def add(self) -> None:
        """Autograd itself adds up the gradients of micro-batches."""

    def take(self) -> None:
        """Move the gradient into the bucket; one that never came is zero."""
        grad = self.parameter.grad
        if grad is self.as_grad:
            return
        if grad is None:
            self.view.zero_()
        else:
            self.view.copy_(local_part(grad))
        self.parameter.grad = self.as_grad


class _NarrowSlot:
    """A 16-bit parameter and the place of its fp32 gradient in a bucket."""

    def __init__(self, parameter: nn.Parameter, view: Tensor) -> None:
        self.parameter = parameter
        self.view = view
        self._has_sum = False

    def clear(self) -> None:
        """Forget the last step's gradient."""
        self.parameter.grad = None
        self._has_sum = False

    def add(self) -> None:
        """Add the gradient of one backward to the sum."""
        grad = self.parameter.grad
        if grad is None:
            return
        if self._has_sum:
            self.view.add_(local_part(grad))
        else:
            self.view.copy_(local_part(grad))
        self._has_sum = True
        self.parameter.grad = None

    def take(self) -> None:
        """Complete the sum; one that no gradient came to is zero."""
        self.add()
        if not self._has_sum:
            self.view.zero_()
            self._has_sum = True


def _fill_buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Consecutive parameters, ``BUCKET_BYTES`` at most unless one alone is larger."""
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        # The sum of 16-bit gradients is fp32.
        size = local_part(parameter.detach()).numel() * max(4, parameter.element_size())
        if not buckets or size > room:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(parameter)
        room -= size
    return buckets


class Gradients:
    """All gradient sums of a rank's stages."""

    def __init__(self, stages: Sequence[Stage], mesh: Mesh) -> None:
        self.mesh = mesh
        self.shards = [shard for stage in stages for shard in stage.shards]
        data_group = None if is_sharded(mesh.layout) else mesh.group(DATA)
        self.buckets = bucket_shards(self.shards, data_group)
        self.partial = [s for s in self.shards if s.grad_partial_over_tp]
        self.tied = find_tied(stages, mesh)
        self.late = [stage.late for stage in stages if stage.late is not None]

    def zero(self) -> None:
        """Start a step."""
        if self.buckets is not None:
            self.buckets.zero()
        for shard in self.shards:
            shard.parameter.grad = None

    def before_last_backward(self) -> None:
        """Say that the next micro-batch is the step's last."""
        if self.buckets is not None:
            self.buckets.arm()

    def finish(self) -> None:
        """Complete the sums; collective over the mesh. Local gradients are final after it."""
        for late in self.late:
            late.finish()
        if self.buckets is not None:
            self.buckets.finish()
        if self.partial:
            sum_over_group([grad_of(s) for s in self.partial], self.mesh.group("tp"))
        if self.tied:
            sum_tied([grad_of(shard) for shard in self.tied], self.mesh)


def bucket_shards(
    shards: Sequence[Shard], group: dist.ProcessGroup | None
) -> GradientBuckets | None:
    """Buckets of what is summed over ``group`` and of what has a master; None: there is neither."""
    masters = {s.parameter: s.master for s in shards if s.master is not None}
    chosen = [s.parameter for s in shards if group is not None or s.master is not None]
    return GradientBuckets(chosen, group, masters) if chosen else None


def grad_of(shard: Shard) -> Tensor:
    """The local gradient, zeros where backward left none."""
    grad = shard.local_grad
    if grad is None:
        # A parameter without a gradient on this rank (an empty shard) still takes part in sums.
        shard.parameter.grad = torch.zeros_like(shard.parameter)
        grad = shard.local_grad
        assert grad is not None
    return grad


def find_tied(stages: Sequence[Stage], mesh: Mesh) -> list[Shard]:
    """The copies of the tied embedding on this rank: first stage's, last stage's, or none.

    A V-shaped pipeline has both on its first rank.
    """
    if mesh.layout.pp == 1:
        return []
    return [
        shard
        for stage in stages
        for shard in stage.shards
        if shard.name == "embed" and stage.model.ties_embedding
    ]


def sum_over_group(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum small tensors over ``group`` in place, as one message."""
    flat = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def sum_tied(grads: Sequence[Tensor], mesh: Mesh) -> None:
    """Add the gradients of the two copies of a tied embedding, first stage and last, in place.

    Every copy gets first + last, added in that order, so the copies stay equal bit for bit.

    Args:
        grads: of the copies on this rank, in the order of the model.
        mesh: this rank's.
    """
    if len(grads) == 2:
        first, last = grads
        last.copy_(first.add_(last))
        return
    [grad] = grads
    is_first = mesh.coordinate.pp == 0
    peer = mesh.peer_at_stage(mesh.layout.pp - 1 if is_first else 0)
    theirs = torch.empty_like(grad)
    group = mesh.group("pp")
    exchange = [
        dist.P2POp(dist.isend, grad.contiguous(), peer, group),
        dist.P2POp(dist.irecv, theirs, peer, group),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    grad.copy_(grad + theirs if is_first else theirs + grad)
