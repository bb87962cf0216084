"""What a run takes of each rank's memory, from its configuration alone. No torch.

A training step is replayed as the allocations it makes, in its own order: blocks, gradients and
the messages of a pipeline's plan are walked through, so the peak is found where it is and not put
together from formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcp_parallel.config import Config
from mcp_parallel.division import microbatch_counts
from mcp_parallel.layout import Layout
from mcp_parallel.memory.family import replayed_of
from mcp_parallel.memory.ledger import Ledger
from mcp_parallel.memory.onebit import OneBitWeights
from mcp_parallel.memory.pipeline import PipelineRank
from mcp_parallel.memory.replay import StageReplay
from mcp_parallel.memory.sharded import ShardedWeights
from mcp_parallel.memory.sizes import Sizes, StageSizes, stages_of
from mcp_parallel.memory.weights import Weights


@dataclass(frozen=True)
class Estimate:
    """Of one rank."""

    peak_bytes: int
    parts: dict[str, int]
    """Bytes of each part at the peak."""


def estimate(config: Config, pp_rank: int = 0) -> Estimate:
    """The peak of the ranks at place ``pp_rank`` of the pipeline, the largest of them.

    Args:
        config: checked.
        pp_rank: pipeline rank, below ``parallel.pp``.

    Cost: some 100 microseconds for each block and micro-batch; of the latter no more are replayed
    than it takes to reach the steady state.
    """
    ledger, sizes = Ledger(), Sizes.of(config)
    layout = Layout.from_config(config.parallel)
    count = max(microbatch_counts(config))
    stages: dict[int, StageReplay] = {}
    for stage in stages_of(config, pp_rank):
        weights = _weights(ledger, config, sizes, stage)
        stages[stage.index] = StageReplay(ledger, config, sizes, stage, weights)
    family = replayed_of(config.model)
    ledger.new(family.table_bytes(sizes), "activations")
    samples = family.sample_bytes(sizes) * sizes.samples * count
    ledger.new(samples)
    if layout.cp > 1:  # and this rank's part of each
        ledger.new(samples // layout.cp)
    if layout.pp > 1:
        # Memory of all but GPipe is at its most before 3 pp micro-batches (2 pp with most of them).
        replayed = count if layout.schedule == "gpipe" else min(count, 3 * layout.pp)
        step = PipelineRank(ledger, config, sizes, stages, pp_rank, replayed)
    else:
        step = MicrobatchLoop(ledger, stages[0], count)
    for _ in range(max(stage.weights.num_steps for stage in stages.values())):
        for stage in stages.values():
            stage.weights.start_step()
        step.run()
        for stage in stages.values():
            stage.weights.update()
    return Estimate(ledger.peak, ledger.at_peak)


class MicrobatchLoop:
    """One stage: micro-batches one after the other."""

    def __init__(self, ledger: Ledger, stage: StageReplay, count: int) -> None:
        self.ledger, self.stage = ledger, stage
        self.count = min(count, 3)  # from the second on they are alike, but for the last

    def run(self) -> None:
        """One step."""
        for index in range(self.count):
            normed = self.stage.forward(index, None)
            self.stage.loss(index, normed)
            self.ledger.drop(normed)
            self.stage.weights.start_microbatch(is_last=index == self.count - 1)
            self.stage.backward(index, None)


def _weights(
    ledger: Ledger, config: Config, sizes: Sizes, stage: StageSizes
) -> Weights | ShardedWeights:
    layout = Layout.from_config(config.parallel)
    if config.train.optimizer == "onebit_adam":
        return OneBitWeights(ledger, config, sizes, stage)
    if layout.zero > 0 and layout.zero_ranks > 1:
        return ShardedWeights(ledger, config, sizes, stage)
    return Weights(ledger, config, sizes, stage, summed=layout.dp_cp > 1)
