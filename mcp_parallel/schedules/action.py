"""The words of a schedule: actions, the placement of stages, a whole plan. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]
"""Forward, full backward, input gradient alone, weight gradient alone (B does I and W at once)."""

V_SHAPED = frozenset({"zbv", "dualpipev"})
"""Schedules that place the model on the ranks as a V: down and up again."""

SPLIT = frozenset({"zero_bubble", "zbv", "dualpipev"})
"""Schedules that run input and weight gradients apart."""


class Action(NamedTuple):
    """One piece of work of one pipeline rank."""

    kind: Kind
    stage: int
    """Place in the model, 0 to ``pp * chunks - 1``."""
    microbatch: int
    chunk: int
    """Which of its rank's stages, in the order of the model."""

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of stage {self.stage}"


@dataclass(frozen=True)
class Plan:
    """What every pipeline rank does in one step, in order."""

    schedule: str
    pp: int
    chunks: int
    """Stages on each rank."""
    num_microbatches: int
    orders: tuple[tuple[Action, ...], ...]
    """Actions of each rank."""

    @property
    def num_stages(self) -> int:
        """Stages over all ranks."""
        return self.pp * self.chunks

    def owner(self, stage: int) -> int:
        """The rank that holds ``stage``."""
        return owner_of(self.schedule, self.pp, stage)


def stage_of(schedule: str, pp: int, rank: int, chunk: int) -> int:
    """The stage that is chunk ``chunk`` of ``rank``.

    V-shaped schedules give rank r the stages r and 2 pp - 1 - r, so that the first and the last
    stage are on rank 0; all others go round the ranks.
    """
    if schedule in V_SHAPED and chunk == 1:
        return 2 * pp - 1 - rank
    return chunk * pp + rank


def owner_of(schedule: str, pp: int, stage: int) -> int:
    """The rank that holds ``stage``; inverse of ``stage_of``."""
    if schedule in V_SHAPED and stage >= pp:
        return 2 * pp - 1 - stage
    return stage % pp
