"""Weights that ``fully_shard`` splits over dp (ZeRO 1 to 3) as allocations. No torch.

Groups are those of ``parallel/parallelize.py``: each block, and all else of the stage ("root").
What happens when follows torch's ``_fsdp_param_group.py``:

    before forward    gather into one buffer, copy out to weights; the buffer waits for the next one
    after forward     ZeRO 3 frees a block's weights
    before backward   gather again, copy out; the block that comes next is gathered meanwhile
    after backward    gradients into one buffer, which waits for the next one; reduce; free weights
"""

from __future__ import annotations

from collections.abc import Iterator

from mcp_parallel.config import Config
from mcp_parallel.layout import Layout
from mcp_parallel.memory.ledger import Ledger, Memory
from mcp_parallel.memory.sizes import Sizes, StageSizes
from mcp_parallel.memory.weights import ROOT, moments_bytes, weights_of


class ShardedWeights:
    """The weights of one stage, of which this rank keeps one part of ``layout.zero_ranks``."""

    def __init__(self, ledger: Ledger, config: Config, sizes: Sizes, stage: StageSizes) -> None:
        self.ledger, self.sizes = ledger, sizes
        layout = Layout.from_config(config.parallel)
        self.zero, self.ranks = layout.zero, layout.zero_ranks
        self._reduces_at_end = layout.pp > 1
        self.is_last = False
        self._elements: dict[str, int] = {}
        weights = weights_of(config, sizes, stage)
        for name, elements in weights.items():
            group, dot, _ = name.partition(".")
            group = group if dot else ROOT
            self._elements[group] = self._elements.get(group, 0) + elements
        self._order = [str(number) for number in range(stage.num_layers)]
        shard = sum(self._shard(group) for group in self._elements)
        ledger.new(shard * sizes.state_bytes, "parameters")
        parts = (-(-elements // self.ranks) for elements in weights.values())
        ledger.new(moments_bytes(config, parts, sizes.state_bytes), "optimizer")
        self._whole: dict[str, Memory] = {}
        self._gathered: dict[str, Memory] = {}
        self._raw: dict[str, dict[str, Memory]] = {group: {} for group in self._elements}
        self._sums: dict[str, Memory] = {}
        self._waiting_gather: Memory | None = None
        self._waiting_reduce: Memory | None = None

    def _shard(self, group: str) -> int:
        return -(-self._elements[group] // self.ranks)

    num_steps = 2
    """As of ``Weights``."""

    def update(self) -> None:
        """As of ``Weights``."""

    def start_step(self) -> None:
        """Gradients of the last step are forgotten."""
        self.ledger.drop(*self._sums.values())
        self._sums.clear()

    def start_microbatch(self, *, is_last: bool) -> None:
        """What comes next is one micro-batch's backward."""
        self.is_last = is_last

    def give(self, group: str, weight: str, elements: int) -> None:
        """A gradient was made: it is the first, or is added to the sum."""
        grad = self.ledger.new(elements * self.sizes.compute_bytes, "gradients")
        if weight in self._raw[group]:
            self.ledger.drop(grad)
        else:
            self._raw[group][weight] = grad

    def before_forward(self, group: str) -> None:
        """Gather what is not whole."""
        if group in self._elements and group not in self._whole:
            self._gather(group)
            self.ledger.drop(self._waiting_gather)
            self._waiting_gather = self._copy_out(group)

    def after_forward(self, group: str) -> None:
        """ZeRO 3 frees blocks."""
        if group == ROOT:
            self.ledger.drop(self._waiting_gather)
            self._waiting_gather = None
        elif self.zero == 3:
            self.ledger.drop(self._whole.pop(group))

    def before_backward(self, group: str) -> None:
        """Gather what is not whole, and start with what is needed next."""
        if group in self._whole:
            return
        if group not in self._gathered:
            self._gather(group)
        self.ledger.drop(self._copy_out(group))
        for following in self._following(group):
            self._gather(following)

    def after_backward(self, group: str) -> None:
        """Reduce the gradients, free the weights; a pipeline does both at the end of a step."""
        if not self._reduces_at_end and group in self._elements:
            self._reduce(group)

    def finish_step(self) -> None:
        """The end of a pipeline's step."""
        if self._reduces_at_end:
            self.is_last = True
            for group in self._elements:
                self._reduce(group)
            self.ledger.drop(self._waiting_reduce)
            self._waiting_reduce = None

    def _reduce(self, group: str) -> None:
        reduces = self.is_last or self.zero >= 2
        if self.is_last or self.zero == 3:
            self.ledger.drop(self._whole.pop(group))
        if not reduces:
            return
        self.ledger.drop(self._waiting_reduce)
        width = self.sizes.state_bytes
        self._waiting_reduce = self.ledger.new(
            self._shard(group) * self.ranks * width, "communication"
        )
        self.ledger.drop(*self._raw[group].values())
        self._raw[group].clear()
        reduced = self.ledger.new(self._shard(group) * width, "gradients")
        if group in self._sums:
            self.ledger.drop(reduced)
        else:
            self._sums[group] = reduced

    def finish_backward(self) -> None:
        """The end of a backward pass: the root's gradients, and on the last one all buffers."""
        self.after_backward(ROOT)
        if self.is_last and not self._reduces_at_end:
            self.ledger.drop(self._waiting_reduce)
            self._waiting_reduce = None

    def _following(self, group: str) -> Iterator[str]:
        place = self._order.index(group) if group in self._order else 0
        if place > 0 and self._order[place - 1] not in self._whole:
            yield self._order[place - 1]

    def _gather(self, group: str) -> None:
        elements = self._shard(group) * self.ranks
        self._gathered[group] = self.ledger.new(
            elements * self.sizes.compute_bytes, "communication"
        )

    def _copy_out(self, group: str) -> Memory:
        """Weights out of the buffer, which is given back."""
        elements = self._shard(group) * self.ranks
        self._whole[group] = self.ledger.new(elements * self.sizes.compute_bytes, "parameters")
        return self._gathered.pop(group)
