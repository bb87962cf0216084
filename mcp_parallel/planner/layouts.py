"""What the planner is asked and what it chooses among. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from mcp_parallel.config import ModelConfig, RankOrder, Schedule
from mcp_parallel.planner.hardware import Hardware
from mcp_parallel.planner.runtime import CHECKPOINTING, OURS, Checkpointing, Runtime
from mcp_parallel.planner.shape import Shape, shape_of

__all__ = ["CHECKPOINTING", "Checkpointing", "Job", "PlannedLayout"]


class PlannedLayout(NamedTuple):
    """One way to spread a run over its ranks; names as in the config's tables."""

    dp: int
    tp: int
    pp: int
    cp: int
    schedule: Schedule
    virtual_stages: int
    micro_batch_size: int
    zero: int
    activation_checkpointing: Checkpointing
    rank_order: RankOrder = "pp-dp-cp-tp"

    @property
    def stages_per_rank(self) -> int:
        """Stages on each pipeline rank."""
        return 2 if self.schedule in ("zbv", "dualpipev") and self.pp > 1 else self.virtual_stages

    @property
    def num_stages(self) -> int:
        """Over all ranks."""
        return self.pp * self.stages_per_rank

    @property
    def degrees(self) -> tuple[int, int, int, int]:
        """(dp, tp, pp, cp)."""
        return self.dp, self.tp, self.pp, self.cp

    def __str__(self) -> str:
        context = f" cp {self.cp}" if self.cp > 1 else ""
        stages = f" x {self.virtual_stages}" if self.virtual_stages > 1 else ""
        pipeline = f" {self.schedule}{stages}" if self.pp > 1 else ""
        return (
            f"dp {self.dp} tp {self.tp} pp {self.pp}{context}{pipeline}, micro-batch "
            f"{self.micro_batch_size}, zero {self.zero}, checkpointing "
            f"{self.activation_checkpointing}, ranks {self.rank_order}"
        )

    def to_mapping(self) -> dict[str, Any]:
        """Plain values, as ``plan --json`` prints them."""
        return dict(self._asdict())


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run on given hardware, without its layout."""

    model: ModelConfig
    ranks: int
    hardware: Hardware
    global_batch_size: int
    """Samples of ``model.seq_len`` tokens."""
    precision: str = "bf16"
    """Of the matmuls: bf16, fp16, fp32, fp64, or fp8 with bf16 for all else."""
    runtime: Runtime = OURS

    @cached_property
    def shape(self) -> Shape:
        """Of the model; a search asks for it a hundred thousand times."""
        return shape_of(self.model)

    @cached_property
    def compute_bytes(self) -> int:
        """Of an activation."""
        return {"fp64": 8, "fp32": 4}.get(self.precision, 2)

    @cached_property
    def state_bytes(self) -> int:
        """Of a weight, gradient or moment as the optimizer sees it."""
        return max(4, self.compute_bytes)

    def num_microbatches(self, layout: PlannedLayout) -> int:
        """That a rank runs in a step."""
        return self.global_batch_size // (layout.dp * layout.micro_batch_size)

    def tokens(self, layout: PlannedLayout) -> int:
        """Of a micro-batch, where a layer sees the whole of this rank's part of each sequence."""
        return layout.micro_batch_size * -(-self.model.seq_len // layout.cp)

    def head_tokens(self, layout: PlannedLayout) -> int:
        """Of a micro-batch, where the head works: each of them, or one an image."""
        one = self.shape.head_positions == 1
        return layout.micro_batch_size if one else self.tokens(layout)
