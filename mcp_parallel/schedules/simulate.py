"""A plan run on paper: when each action starts and ends, and that all of them can. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from mcp_parallel.schedules.action import Action, Plan


@dataclass(frozen=True)
class Costs:
    """Time of one action of one chunk, in any unit; a full backward is both gradients."""

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    comm: float = 0.0
    """From the end of an action to its result on another rank; no rank is busy with it."""
    stages: tuple[float, ...] | None = None
    """Factor of each stage's times, where stages are unlike; None is 1."""

    def of(self, action: Action) -> float:
        """Duration of ``action``."""
        factor = 1.0 if self.stages is None else self.stages[action.stage]
        return (
            factor
            * {
                "F": self.forward,
                "B": self.input_grad + self.weight_grad,
                "I": self.input_grad,
                "W": self.weight_grad,
            }[action.kind]
        )


@dataclass(frozen=True)
class Span:
    """An action and its place in time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """All ranks' spans, from time 0 to the end of the last action."""

    plan: Plan
    ranks: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """End of the last action."""
        return max(spans[-1].end for spans in self.ranks)

    def busy(self, rank: int) -> float:
        """Time that ``rank`` works."""
        return sum(span.end - span.start for span in self.ranks[rank])

    def bubble(self, rank: int) -> float:
        """Part of the makespan that ``rank`` waits, 0 to 1."""
        return 1 - self.busy(rank) / self.makespan

    def gap(self, rank: int) -> float:
        """Time that ``rank`` waits between its first and its last action."""
        spans = self.ranks[rank]
        return spans[-1].end - spans[0].start - self.busy(rank)


class DeadlockError(ValueError):
    """Every rank's next action waits for one that is not done."""


def simulate(plan: Plan, costs: Costs | None = None) -> Timeline:
    """Start each action as soon as its rank is free and what it needs has arrived.

    Raises:
        DeadlockError: ranks wait for each other; the message names what each waits for.

    Cost: actions times ranks at most.
    """
    costs = costs or Costs()
    ends: dict[tuple[str, int, int], float] = {}
    spans: list[list[Span]] = [[] for _ in plan.orders]
    waiting = set(range(plan.pp))
    while waiting:
        moved = False
        for rank in sorted(waiting):
            order, done = plan.orders[rank], spans[rank]
            while len(done) < len(order):
                action = order[len(done)]
                ready = _ready(plan, rank, action, ends, costs.comm)
                if ready is None:
                    break
                start = max(ready, done[-1].end if done else 0.0)
                done.append(Span(action, start, start + costs.of(action)))
                ends[_result(action)] = done[-1].end
                moved = True
            if len(done) == len(order):
                waiting.discard(rank)
        if not moved:
            stuck = (f"rank {r} at {plan.orders[r][len(spans[r])]}" for r in sorted(waiting))
            raise DeadlockError(f"simulate: plan must have no cycle, got {'; '.join(stuck)}")
    return Timeline(plan, tuple(tuple(row) for row in spans))


def needs(action: Action, num_stages: int) -> tuple[str, int, int] | None:
    """What must be there before ``action``: ``(kind, stage, microbatch)``, B counting as I."""
    kind, stage, microbatch, _ = action
    if kind == "F":
        return ("F", stage - 1, microbatch) if stage > 0 else None
    if kind == "W":
        return ("I", stage, microbatch)
    # A gradient needs the one after it, and that one its forward, which came after this stage's.
    return ("I", stage + 1, microbatch) if stage < num_stages - 1 else ("F", stage, microbatch)


def _result(action: Action) -> tuple[str, int, int]:
    return ("I" if action.kind == "B" else action.kind, action.stage, action.microbatch)


def _ready(
    plan: Plan, rank: int, action: Action, ends: dict[tuple[str, int, int], float], comm: float
) -> float | None:
    need = needs(action, plan.num_stages)
    if need is None:
        return 0.0
    if need not in ends:
        return None
    return ends[need] + (comm if plan.owner(need[1]) != rank else 0.0)
