"""A pipeline rank's step as allocations, in the order of its plan. No torch.

What torch's runtime keeps beside the stages: a receive buffer for each micro-batch and direction,
allocated once; each stage's output until its backward; and what was sent, until the step is over,
or until the next one where the receiver is on this rank.
"""

from __future__ import annotations

from mcp_parallel.config import Config
from mcp_parallel.layout import Layout
from mcp_parallel.memory.ledger import Ledger, Memory
from mcp_parallel.memory.replay import StageReplay
from mcp_parallel.memory.sizes import Sizes
from mcp_parallel.schedules.action import Action
from mcp_parallel.schedules.build import build_plan

_MESSAGES = "communication"


class PipelineRank:
    """The stages of one rank and the order of its actions."""

    def __init__(
        self,
        ledger: Ledger,
        config: Config,
        sizes: Sizes,
        stages: dict[int, StageReplay],
        pp_rank: int,
        num_microbatches: int,
    ) -> None:
        layout = Layout.from_config(config.parallel)
        plan = build_plan(layout.schedule, layout.pp, num_microbatches, layout.stages_per_rank)
        self.ledger, self.stages, self.order = ledger, stages, plan.orders[pp_rank]
        self._hidden = sizes.compute_bytes * sizes.cut_tokens * sizes.hidden
        self._last = plan.num_stages - 1
        self._inputs: dict[tuple[int, int], Memory] = {}
        self._outputs: dict[tuple[int, int], Memory] = {}
        self._sent: list[Memory] = []
        self._local_grads: dict[tuple[int, int], Memory] = {}
        self._is_sent = {
            (index, to): plan.owner(to) != pp_rank
            for index in stages
            for to in (index - 1, index + 1)
            if 0 <= to <= self._last
        }
        for index in stages:
            for microbatch in range(num_microbatches):
                if self._is_sent.get((index, index - 1)):
                    self._inputs[index, microbatch] = self._received()
                if self._is_sent.get((index, index + 1)):
                    self._received()

    def _received(self) -> Memory:
        return self.ledger.new(self._hidden, _MESSAGES)

    def keep_messages(self, num_microbatches: int) -> None:
        """What so many more micro-batches keep for the whole step: both ends of each message."""
        for is_sent in self._is_sent.values():
            self.ledger.new((2 if is_sent else 1) * num_microbatches * self._hidden, _MESSAGES)

    def run(self) -> None:
        """One step."""
        remaining = {
            index: sum(a.stage == index and a.kind in "BW" for a in self.order)
            for index in self.stages
        }
        for action in self.order:
            if action.kind in "BW":
                remaining[action.stage] -= 1
            is_last = remaining[action.stage] == 0
            self.stages[action.stage].weights.start_microbatch(is_last=is_last)
            self._do(action)
        for stage in self.stages.values():
            stage.weights.finish_step()
        self.ledger.drop(*self._sent)
        self._sent.clear()

    def _send(self, memory: Memory | None, index: int, to: int, microbatch: int) -> None:
        """Keep a message while it is under way, or in place of what the next stage here had."""
        is_sent = self._is_sent.get((index, to))
        if memory is None or is_sent is None:
            return
        self.ledger.hold(memory)
        if is_sent:
            self._sent.append(memory)
            return
        mine = self._inputs if to > index else self._local_grads
        self.ledger.drop(mine.get((to, microbatch)))
        mine[to, microbatch] = memory

    def _do(self, action: Action) -> None:
        kind, index, microbatch, _ = action
        stage, key = self.stages[index], (index, microbatch)
        if kind == "F":
            output = stage.forward(microbatch, self._inputs.get(key))
            self._outputs[key] = output
            self._send(output, index, index + 1, microbatch)
            if index == self._last:
                stage.loss(microbatch, output)
            return
        if kind == "W":
            stage.weight_backward(microbatch)
            return
        d_x = stage.backward(microbatch, self._arrived(index), is_split=kind == "I")
        self._send(d_x, index, index - 1, microbatch)
        self.ledger.drop(d_x, self._outputs.pop(key))

    def _arrived(self, index: int) -> Memory | None:
        """The gradient of a stage's output; autograd sums into a copy of what was received."""
        return None if index == self._last else self.ledger.new(self._hidden)
