"""Sums of ZeRO's gradients that travel while backward goes on, on ranks without streams.

``fully_shard`` overlaps its reduce-scatters with computation through streams of a GPU; on a CPU it
waits for each where it starts it. Here the call returns at once and the result is waited for when
somebody needs it: when the module's gradients of another micro-batch are to be added, when too many
are under way, or at the end of the step. What is computed, and in which order sums are taken, stays
the same bit for bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mcp_kernels.spans import communication
from mcp_parallel.parallel.seen_waits import SeenReduceScatter
from mcp_parallel.parallel.shards import local_part

# Whole gradients of a block wait in memory while they travel. Two keep a link busy: one is under
# way while the next one is made.
MOST_UNDER_WAY = 2


class LateReductions:
    """The reduce-scatters of one stage that were started and not waited for."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[LateReduceScatter, dist.Work, Tensor]] = deque()
        self._modules: list[LateReduceScatter] = []

    def take_over(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """Make the reduce-scatters of ``module`` late ones.

        Args:
            module: under ``fully_shard`` on a mesh of one dimension, whose gradients are of the
                dtype that they are summed in.
            parameters: those that ``fully_shard`` manages for this module alone.
        """
        assert isinstance(module, FSDPModule)
        late = LateReduceScatter(self, parameters)
        module.set_custom_reduce_scatter(late)
        self._modules.append(late)

    def make_room(self) -> None:
        """Until one more may be under way."""
        while len(self._under_way) >= MOST_UNDER_WAY:
            self._wait_for_oldest()

    def add(self, owner: LateReduceScatter, work: dist.Work, packed: Tensor) -> None:
        """One was started; ``packed`` is what it sends, kept until it is complete."""
        self._under_way.append((owner, work, packed))

    def wait_for(self, owner: LateReduceScatter) -> None:
        """Until nothing of ``owner`` is under way."""
        while any(other is owner for other, _, _ in self._under_way):
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        _, work, _ = self._under_way.popleft()
        with communication("wait for gradients"):
            work.wait()

    def finish(self) -> None:
        """Until every gradient of the step is complete, over its micro-batches as well."""
        while self._under_way:
            self._wait_for_oldest()
        for module in self._modules:
            module.add_earlier()


class LateReduceScatter(SeenReduceScatter):
    """A sum that nobody waits for where it is started."""

    def __init__(self, all_of_stage: LateReductions, parameters: Sequence[nn.Parameter]) -> None:
        self._all = all_of_stage
        self._parameters = parameters
        self._earlier: list[tuple[nn.Parameter, Any]] = []

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work:
        """Start the sum. ``fully_shard`` then makes ``output_tensor`` the gradient, unread.

        It would add it to a gradient that is there already, which needs its values: gradients of
        earlier micro-batches are put aside, and added when both are complete.
        """
        self._all.wait_for(self)
        self.add_earlier()
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._earlier.append((parameter, parameter.grad))
                parameter.grad = None
        self._all.make_room()
        work = super().__call__(output_tensor, input_tensor, group, op, async_op=True)
        self._all.add(self, work, input_tensor)
        return work

    def add_earlier(self) -> None:
        """Add what was put aside; nothing of this module may be under way."""
        for parameter, earlier in self._earlier:
            if parameter.grad is None:  # this micro-batch gave it none
                parameter.grad = earlier
            else:
                local_part(parameter.grad).add_(local_part(earlier))
        self._earlier.clear()
