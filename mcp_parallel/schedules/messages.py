"""What a plan sends between ranks: where receives are posted, and when a send is known to be over.

No torch.
"""

from __future__ import annotations

from typing import NamedTuple

from mcp_parallel.schedules.action import Action, Plan
from mcp_parallel.schedules.simulate import needs


class Message(NamedTuple):
    """An activation or its gradient, named by the action that makes it."""

    is_gradient: bool
    stage: int
    """Of the sender."""
    microbatch: int

    @property
    def target(self) -> int:
        """The stage that gets it."""
        return self.stage - 1 if self.is_gradient else self.stage + 1


def sent_by(plan: Plan, action: Action) -> Message | None:
    """What ``action`` sends to another rank; None for nothing, or to a stage of its own rank."""
    if action.kind == "W":
        return None
    message = Message(action.kind != "F", action.stage, action.microbatch)
    if not 0 <= message.target < plan.num_stages:
        return None
    return message if plan.owner(message.target) != plan.owner(action.stage) else None


def needed_by(plan: Plan, action: Action) -> Message | None:
    """What ``action`` waits for from another rank; None for nothing, or from its own rank."""
    need = needs(action, plan.num_stages)
    if need is None or plan.owner(need[1]) == plan.owner(action.stage):
        return None
    kind, stage, microbatch = need
    return Message(kind != "F", stage, microbatch)


def posted_receives(plan: Plan) -> tuple[tuple[Action | Message, ...], ...]:
    """Each rank's order with its receives where torch's runtime posts them: as early as may be.

    All ranks go on by one action in turn; an action that sends posts the receive at once on the
    other side, behind what that rank has done so far.

    Cost: linear in actions.
    """
    orders: list[list[Action | Message]] = [[] for _ in plan.orders]
    left = [list(reversed(order)) for order in plan.orders]
    there: set[Message] = set()
    while any(left):
        for rank, order in enumerate(left):
            if not order:
                continue
            needed = needed_by(plan, order[-1])
            if needed is not None and needed not in there:
                continue
            action = order.pop()
            orders[rank].append(action)
            message = sent_by(plan, action)
            if message is not None:
                there.add(message)
                orders[plan.owner(message.target)].append(message)
    return tuple(map(tuple, orders))


def proofs_of_delivery(plan: Plan, rank: int) -> dict[Message, tuple[Message, ...]]:
    """What each message to ``rank`` proves: which of its own sends are over once it has come.

    The other side had waited for those before it sent this one. A send that nothing proves ends
    with the step; of 1F1B those are as many as the drain is long.

    Cost: linear in actions.
    """
    proofs: dict[Message, tuple[Message, ...]] = {}
    for peer, order in enumerate(plan.orders):
        taken: list[Message] = []
        for action in order if peer != rank else ():
            needed, sent = needed_by(plan, action), sent_by(plan, action)
            if needed is not None and plan.owner(needed.stage) == rank:
                taken.append(needed)
            if sent is not None and plan.owner(sent.target) == rank and taken:
                proofs[sent] = tuple(taken)
                taken.clear()
    return proofs
