"""Who is where: the layout of a run and the pure functions that follow from it. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from mcp_parallel.config import CpAttention, ParallelConfig, RankOrder, Schedule
from mcp_parallel.schedules.action import V_SHAPED, owner_of, stage_of


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A rank's place on each mesh axis."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Degrees of each kind of parallelism and what depends on them alone."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero: int = 0
    schedule: Schedule = "1f1b"
    virtual_stages: int = 1
    sequence_parallel: bool = True
    dp_replicate: int = 1
    cp_attention: CpAttention = "all_gather"
    rank_order: RankOrder = "dp-pp-cp-tp"
    stage_split: str = "count"
    dp_shares: str | None = None

    @classmethod
    def from_config(cls, parallel: ParallelConfig) -> Layout:
        """The layout that a checked ``parallel`` table names."""
        return cls(
            dp=parallel.dp,
            tp=parallel.tp,
            pp=parallel.pp,
            cp=parallel.cp,
            zero=parallel.zero,
            schedule=parallel.schedule,
            virtual_stages=parallel.virtual_stages,
            sequence_parallel=parallel.sequence_parallel,
            dp_replicate=parallel.dp_replicate,
            cp_attention=parallel.cp_attention,
            rank_order=parallel.rank_order,
            stage_split=parallel.stage_split,
            dp_shares=parallel.dp_shares,
        )

    @property
    def world_size(self) -> int:
        """Ranks in the run."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def dp_cp(self) -> int:
        """Ranks that hold the same parameters and different tokens: replicas times their cp."""
        return self.dp * self.cp

    @property
    def dp_shard(self) -> int:
        """Data-parallel ranks of one of the ``dp_replicate`` groups that dp is made of."""
        return self.dp // self.dp_replicate

    @property
    def zero_ranks(self) -> int:
        """Ranks over which ZeRO shards: a group's data-parallel ranks with their cp."""
        return self.dp_shard * self.cp

    @property
    def is_hybrid(self) -> bool:
        """Whether ZeRO shards within groups of ranks and replicates between them (HSDP)."""
        return self.dp_replicate > 1 and self.zero_ranks > 1

    @property
    def stages_per_rank(self) -> int:
        """Stages on each pipeline rank: a V has two, any other schedule ``virtual_stages``."""
        return 2 if self.schedule in V_SHAPED and self.pp > 1 else self.virtual_stages

    @property
    def num_stages(self) -> int:
        """Pipeline stages over all ranks, virtual ones included."""
        return self.pp * self.stages_per_rank

    def stage_owner(self, stage: int) -> int:
        """Pipeline rank that holds ``stage``; virtual stages go round the ranks, or down and up."""
        return owner_of(self.schedule, self.pp, stage) if self.pp > 1 else 0

    def stages_of(self, pp: int) -> list[int]:
        """The stages of pipeline rank ``pp``, in the order of the model."""
        chunks = range(self.stages_per_rank)
        return [stage_of(self.schedule, self.pp, pp, chunk) for chunk in chunks]

    def coordinate(self, rank: int) -> Coordinate:
        """Mesh place of ``rank``: tp varies fastest (neighbours), then cp.

        Then pp, and dp slowest, or the other way round: as ``rank_order`` says.
        """
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        if self._is_dp_outermost:
            dp, pp = divmod(rest, self.pp)
        else:
            pp, dp = divmod(rest, self.dp)
        return Coordinate(pp=pp, dp=dp, cp=cp, tp=tp)

    def rank_of(self, place: Coordinate) -> int:
        """The rank at a mesh place; the inverse of ``coordinate``."""
        if self._is_dp_outermost:
            pair = place.dp * self.pp + place.pp
        else:
            pair = place.pp * self.dp + place.dp
        return (pair * self.cp + place.cp) * self.tp + place.tp

    @property
    def _is_dp_outermost(self) -> bool:
        return self.rank_order == "dp-pp-cp-tp"

    def places(self) -> Iterator[Coordinate]:
        """Every mesh place, in the order (pp, dp, cp, tp) whatever the order of ranks."""
        axes = (range(self.pp), range(self.dp), range(self.cp), range(self.tp))
        for pp, dp, cp, tp in product(*axes):
            yield Coordinate(pp=pp, dp=dp, cp=cp, tp=tp)

    def place_index(self, place: Coordinate) -> int:
        """Index of a place in ``places``: the same for both orders of ranks."""
        return ((place.pp * self.dp + place.dp) * self.cp + place.cp) * self.tp + place.tp

    def ranks_at_stage(self, pp: int) -> list[list[int]]:
        """The ranks at pipeline rank ``pp`` as runs ``[first, past the last]``, rising."""
        each = self.cp * self.tp
        if not self._is_dp_outermost or self.pp == 1:
            first = pp * self.dp * each
            return [[first, first + self.dp * each]]
        firsts = ((dp * self.pp + pp) * each for dp in range(self.dp))
        return [[first, first + each] for first in firsts]

    def data_index(self, place: Coordinate) -> int:
        """Index of a place among the ``dp_cp`` ranks that share its parameters."""
        return place.dp * self.cp + place.cp


def split_layers(num_layers: int, num_stages: int) -> list[range]:
    """Contiguous block ranges of each stage; earlier stages take the remainder, none is lost.

    The last stage also runs the head, so it is right that it never has more blocks than others.
    """
    base, extra = divmod(num_layers, num_stages)
    stages, start = [], 0
    for stage in range(num_stages):
        stop = start + base + (stage < extra)
        stages.append(range(start, stop))
        start = stop
    return stages


def split_dim(size: int, parts: int, index: int) -> tuple[int, int]:
    """(offset, length) of part ``index`` when ``size`` is cut the way ``torch.chunk`` cuts it.

    Parts of ceil(size / parts); the tail parts may be shorter or empty.
    """
    step = -(-size // parts)
    start = min(index * step, size)
    return start, min(start + step, size) - start
