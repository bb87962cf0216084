"""A pipeline rank's step as allocations, in the order of its plan. No torch.

What there is beside the stages: a receive buffer from when it is posted until the backward that is
the last to need it; each stage's output until its backward; and what was sent, until a message
proves it delivered or the step is over.
"""

from __future__ import annotations

from mcp_parallel.config import Config
from mcp_parallel.layout import Layout
from mcp_parallel.memory.ledger import Ledger, Memory
from mcp_parallel.memory.replay import StageReplay
from mcp_parallel.memory.sizes import Sizes
from mcp_parallel.schedules.action import Action
from mcp_parallel.schedules.build import build_plan
from mcp_parallel.schedules.messages import Message, posted_receives, proofs_of_delivery

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
        self.plan = build_plan(layout.schedule, layout.pp, num_microbatches, layout.stages_per_rank)
        self.ledger, self.stages, self.rank = ledger, stages, pp_rank
        self.order = posted_receives(self.plan)[pp_rank]
        self._proofs = proofs_of_delivery(self.plan, pp_rank)
        self._hidden = sizes.compute_bytes * sizes.cut_tokens * sizes.hidden
        self._inbox: dict[Message, Memory] = {}
        """Received, or given by a stage of this rank."""
        self._outputs: dict[tuple[int, int], Memory] = {}
        self._sent: dict[Message, Memory] = {}

    def run(self) -> None:
        """One step."""
        actions = [item for item in self.order if isinstance(item, Action)]
        remaining = {
            index: sum(a.stage == index and a.kind in "BW" for a in actions)
            for index in self.stages
        }
        for item in self.order:
            if isinstance(item, Message):
                self._inbox[item] = self.ledger.new(self._hidden, _MESSAGES)
                continue
            if item.kind in "BW":
                remaining[item.stage] -= 1
            is_last = remaining[item.stage] == 0
            self.stages[item.stage].weights.start_microbatch(is_last=is_last)
            self._do(item)
        for stage in self.stages.values():
            stage.weights.finish_step()
        self.ledger.drop(*self._sent.values())
        self._sent.clear()

    def _do(self, action: Action) -> None:
        kind, index, microbatch, _ = action
        stage, key = self.stages[index], (index, microbatch)
        came, answer = Message(False, index - 1, microbatch), Message(True, index + 1, microbatch)
        if kind == "F":
            self._has_come(came)
            output = stage.forward(microbatch, self._inbox.get(came))
            self._outputs[key] = output
            self._send(output, Message(False, index, microbatch))
            if index == self.plan.num_stages - 1:
                stage.loss(microbatch, output)
            return
        if kind == "W":
            stage.weight_backward(microbatch)
            return
        self._has_come(answer)
        # Autograd sums into a copy of the gradient that came.
        d_y = self.ledger.new(self._hidden) if answer in self._inbox else None
        d_x = stage.backward(microbatch, d_y, is_split=kind == "I")
        self.ledger.drop(self._inbox.pop(came, None), self._inbox.pop(answer, None))
        self._send(d_x, Message(True, index, microbatch))
        self.ledger.drop(d_x, self._outputs.pop(key))

    def _has_come(self, message: Message) -> None:
        """Free what the arrival of ``message`` proves delivered."""
        self.ledger.drop(*(self._sent.pop(sent) for sent in self._proofs.get(message, ())))

    def _send(self, memory: Memory | None, message: Message) -> None:
        """Keep a message while it is under way, or until a stage of this rank has used it."""
        if memory is None or not 0 <= message.target < self.plan.num_stages:
            return
        is_here = self.plan.owner(message.target) == self.rank
        (self._inbox if is_here else self._sent)[message] = self.ledger.hold(memory)
