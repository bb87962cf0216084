"""What a run takes of each rank's memory, from its configuration alone. No torch.

A training step is replayed as the allocations it makes, in its own order: blocks, gradients and
the messages of a pipeline's plan are walked through, so the peak is found where it is and not put
together from formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcp_parallel.config import Config
from mcp_parallel.layout import Layout
from mcp_parallel.memory.ledger import Ledger
from mcp_parallel.memory.replay import StageReplay
from mcp_parallel.memory.sizes import Sizes, stages_of
from mcp_parallel.memory.weights import Weights

NARROW_HEAD = 32
"""As in model/rotary.py; a test holds them together."""


@dataclass(frozen=True)
class Estimate:
    """Of one rank."""

    peak_bytes: int
    parts: dict[str, int]
    """Bytes of each part at the peak."""


def estimate(config: Config, pp_rank: int = 0) -> Estimate:
    """The peak of the ranks at place ``pp_rank`` of the pipeline.

    Args:
        config: checked.
        pp_rank: pipeline rank, below ``parallel.pp``.
    """
    ledger, sizes = Ledger(), Sizes.of(config)
    layout = Layout.from_config(config.parallel)
    [stage] = stages_of(config, pp_rank)
    weights = Weights(ledger, config, sizes, stage, summed=layout.dp_cp > 1)
    replay = StageReplay(ledger, config, sizes, stage, weights)
    count = config.train.global_batch_size // layout.dp // config.train.micro_batch_size
    ledger.new(_tables_bytes(config, sizes), "activations")
    ledger.new(16 * config.model.seq_len * count * config.train.micro_batch_size, "activations")
    for _ in range(2):
        weights.start_step()
        for index in range(min(count, 3)):
            is_last = index == min(count, 3) - 1
            normed = replay.forward(index, None)
            replay.loss(index, normed)
            ledger.drop(normed)
            weights.start_microbatch(is_last=is_last)
            replay.backward(index, None)
    return Estimate(ledger.peak, ledger.at_peak)


def _tables_bytes(config: Config, sizes: Sizes) -> int:
    """Cosines and sines of every position, as ``model/rotary.py`` caches them."""
    each = config.model.seq_len * max(4, sizes.compute_bytes)
    tables = 2 * each * sizes.head_size // 2
    if sizes.head_size <= NARROW_HEAD:
        tables += 2 * each * (sizes.q_width + sizes.kv_width)
    return tables
