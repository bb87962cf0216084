"""Parameters, their gradients and the optimizer's state as allocations. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from mcp_parallel.config import Config
from mcp_parallel.memory.family import replayed_of
from mcp_parallel.memory.ledger import Ledger, Memory
from mcp_parallel.memory.sizes import Sizes, StageSizes

MOMENTS = 2
SMALLEST_FILE = 1 << 14
"""As in optim/lower_tier.py; a test holds them together."""
ROOT = "root"
"""The group of all weights that are in no block."""


class Weights:
    """The weights of one stage, replicated over dp.

    Gradients stay with autograd from a micro-batch to the next; those that are summed over ranks,
    or are 16-bit, end in buckets of the optimizer's format that are there all the time.
    """

    def __init__(
        self,
        ledger: Ledger,
        config: Config,
        sizes: Sizes,
        stage: StageSizes,
        *,
        summed: bool,
        has_moments: bool = True,
    ) -> None:
        self.ledger, self.sizes = ledger, sizes
        self.is_narrow = sizes.compute_bytes < sizes.state_bytes
        self.has_buckets = summed or self.is_narrow
        self.is_last = False
        elements = sum(weights_of(config, sizes, stage).values())
        ledger.new(elements * sizes.compute_bytes, "parameters")
        if self.is_narrow:
            each = weights_of(config, sizes, stage).values()
            ledger.new(resident_bytes(config, each, sizes.state_bytes), "optimizer")  # fp32 values
        self._buckets: Memory | None = None
        if self.has_buckets:
            self._buckets = ledger.new(elements * sizes.state_bytes, "gradients")
        each = weights_of(config, sizes, stage).values()
        if has_moments:
            ledger.new(moments_bytes(config, each, sizes.state_bytes), "optimizer")
        self._raw: dict[tuple[str, str], Memory] = {}

    def start_step(self) -> None:
        """Gradients of the last step are forgotten."""
        self.ledger.drop(*self._raw.values())
        self._raw.clear()

    def start_microbatch(self, *, is_last: bool) -> None:
        """What comes next is one micro-batch's backward."""
        self.is_last = is_last

    def give(self, group: str, weight: str, elements: int) -> None:
        """A gradient was made: it is the first, is added to the sum, or goes into its bucket."""
        grad = self.ledger.new(elements * self.sizes.compute_bytes, "gradients")
        key = (group, weight)
        if self.is_narrow:
            self.ledger.drop(grad)
            return
        if key in self._raw:
            self.ledger.drop(grad)
        else:
            self._raw[key] = grad
        if self.has_buckets and self.is_last:
            self.ledger.drop(self._raw.pop(key))

    def before_forward(self, group: str) -> None:
        """Weights are where they are needed."""

    def after_forward(self, group: str) -> None:
        """And stay there."""

    def before_backward(self, group: str) -> None:
        """Weights are where they are needed."""

    def after_backward(self, group: str) -> None:
        """And stay there."""

    def finish_backward(self) -> None:
        """Nothing waits for the end of a backward pass."""

    def finish_step(self) -> None:
        """Nor for the end of a step."""

    num_steps = 2
    """Steps until every kind of step was there: the second has gradients of the first to forget."""

    def update(self) -> None:
        """The optimizer's part of a step, which takes nothing that is not there."""

    def stop_summing(self) -> None:
        """From now on gradients over dp are the optimizer's to sum."""
        if self._buckets is None:
            return
        if self.is_narrow:  # new buckets, while the optimizer's values still refer to the old ones
            self.ledger.pass_by(self._buckets.num_bytes, "gradients")
            return
        self.ledger.drop(self._buckets)
        self._buckets, self.has_buckets = None, False


def moments_bytes(config: Config, elements: Iterable[int], bytes_each: int) -> int:
    """Of the moments that are in memory."""
    return MOMENTS * resident_bytes(config, elements, bytes_each)


def resident_bytes(config: Config, elements: Iterable[int], bytes_each: int) -> int:
    """Of one value a weight: with offload those weights' that are too small for a file."""
    sizes = (count * bytes_each for count in elements)
    if config.memory.offload:
        sizes = (size for size in sizes if size < SMALLEST_FILE)
    return sum(sizes)


def weights_of(config: Config, sizes: Sizes, stage: StageSizes) -> dict[str, int]:
    """Elements of each weight of a stage on this rank, by a name of its own."""
    family = replayed_of(config.model)
    found = {
        f"{number}.{name}": elements
        for number in range(stage.num_layers)
        for name, elements in family.block.weights(sizes).items()
    }
    return found | family.ends(
        sizes,
        has_embedding=stage.has_embedding,
        has_head=stage.has_head,
        is_tied=config.model.tie_embeddings,
    )
