"""One rank's training step, replayed as allocations. No torch."""

from __future__ import annotations

from collections.abc import Callable

from mcp_parallel.config import Config
from mcp_parallel.layout import Layout
from mcp_parallel.memory.block import BlockPass
from mcp_parallel.memory.ends import HeadPass
from mcp_parallel.memory.family import replayed_of
from mcp_parallel.memory.images import ImageHeadPass
from mcp_parallel.memory.kept import Keeping
from mcp_parallel.memory.ledger import Ledger, Memory
from mcp_parallel.memory.sharded import ShardedWeights
from mcp_parallel.memory.sizes import Sizes, StageSizes
from mcp_parallel.memory.weights import ROOT, Weights


class StageReplay:
    """The micro-batches of one stage."""

    def __init__(
        self,
        ledger: Ledger,
        config: Config,
        sizes: Sizes,
        stage: StageSizes,
        weights: Weights | ShardedWeights,
    ) -> None:
        self.ledger, self.sizes, self.stage, self.weights = ledger, sizes, stage, weights
        self.keeping, self.family = Keeping.of(config.memory), replayed_of(config.model)
        layout = Layout.from_config(config.parallel)
        positions = config.train.micro_batch_size * config.model.seq_len
        is_gpipe = layout.pp > 1 and layout.schedule == "gpipe"
        self._recomputes_head = is_gpipe and config.model.hidden_size > positions
        self._blocks: dict[int, list[BlockPass]] = {}
        self._heads: dict[int, HeadPass | ImageHeadPass] = {}

    def forward(self, microbatch: int, x: Memory | None) -> Memory:
        """What the stage gives; ``x`` is its input, None for tokens, kept by the caller."""
        is_held = x is not None
        self.weights.before_forward(ROOT)
        if x is None:
            x = self.family.embedding_forward(self.ledger, self.sizes)
        else:
            self.ledger.hold(x)
        blocks = self._blocks[microbatch] = []
        for number in range(self.stage.num_layers):
            self.weights.before_forward(self._name(number))
            block = self.family.block(self.ledger, self.sizes, self.keeping)
            result = block.forward(x, x_is_held=is_held and number == 0)
            self.weights.after_forward(self._name(number))
            blocks.append(block)
            self.ledger.drop(x)
            x = result
        if self.stage.has_head:
            head = self.family.head(self.ledger, self.sizes, self._recomputes_head)
            self._heads[microbatch] = head
            normed = head.forward(x)
            self.ledger.drop(x)
            x = normed
        self.weights.after_forward(ROOT)
        return x

    def loss(self, microbatch: int, normed: Memory) -> None:
        """The loss of what ``forward`` gave."""
        self._heads[microbatch].loss(normed)

    def backward(
        self, microbatch: int, d_x: Memory | None, *, is_split: bool = False
    ) -> Memory | None:
        """Gradient of the stage's input; takes over ``d_x``, None at the loss.

        ``is_split`` leaves the gradients of the blocks' linear layers to ``weight_backward``.
        """
        if self.stage.has_head:
            give = self._giver(ROOT)
            d_x = self._heads.pop(microbatch).backward(give, give)
        assert d_x is not None
        blocks = self._blocks[microbatch] if is_split else self._blocks.pop(microbatch)
        for number in reversed(range(self.stage.num_layers)):
            name, block = self._name(number), blocks[number]
            self.weights.before_backward(name)
            run = block.input_backward if is_split else block.backward
            d_x = run(d_x, self._giver(name))
            self.weights.after_backward(name)
        if self.stage.has_embedding:
            self.family.embedding_backward(self.ledger, self.sizes, d_x, self._giver(ROOT))
            d_x = None
        self.weights.finish_backward()
        return d_x

    def weight_backward(self, microbatch: int) -> None:
        """Gradients of the weights after a ``backward`` that is split."""
        for number, block in reversed(list(enumerate(self._blocks.pop(microbatch)))):
            block.weight_backward(self._giver(self._name(number)))

    def _giver(self, group: str) -> Callable[[str, int], None]:
        return lambda weight, elements: self.weights.give(group, weight, elements)

    def _name(self, number: int) -> str:
        return str(number)
