"""Weights under 1-bit Adam as allocations: both stages and the switch between them. No torch.

Mirrors ``mcp_kernels.optim.OneBitAdam`` as the trainer uses it. All state is flat: every weight
takes whole blocks of 1024 elements, and the end is padded to whole blocks of every rank.
Letters: P = padded elements, S = those that a rank updates: P, or P / W with ``parallel.zero = 1``.
"""

from __future__ import annotations

from mcp_parallel.config import Config
from mcp_parallel.layout import Layout
from mcp_parallel.memory.ledger import Ledger, Memory
from mcp_parallel.memory.sizes import Sizes, StageSizes
from mcp_parallel.memory.weights import Weights, weights_of

# As OneBitAdam's default; a test holds them together.
BLOCK_SIZE = 1024
_PART = "optimizer"
_FLOAT = 4
_HALF = 2
_LAST_STEP_OF_STAGE_1 = 2
"""Whose first step no sums of gradients precede."""


class OneBitWeights(Weights):
    """The weights of one stage, whole over dp, and their optimizer's state."""

    def __init__(self, ledger: Ledger, config: Config, sizes: Sizes, stage: StageSizes) -> None:
        layout = Layout.from_config(config.parallel)
        super().__init__(ledger, config, sizes, stage, summed=layout.dp_cp > 1, has_moments=False)
        weights = weights_of(config, sizes, stage)
        self._largest = max(weights.values(), default=0)
        world = layout.dp_cp
        blocks = sum(-(-count // BLOCK_SIZE) for count in weights.values())
        chunk = -(-blocks // world) * BLOCK_SIZE
        self._chunk, self._padded = chunk, chunk * world
        self._has_group = layout.world_size > 1  # a group of one codes what it receives too
        self._is_sharded = layout.zero == 1 and world > 1
        self._span = chunk if self._is_sharded else self._padded
        freeze, steps = config.train.freeze_step, config.train.steps
        self._switches_after: int | None = None
        if freeze is None or freeze <= steps:
            self._switches_after = min(freeze or steps, _LAST_STEP_OF_STAGE_1)
        self._count = 0
        self._moments = [ledger.new(_FLOAT * self._span, _PART) for _ in range(2)]
        if self._is_sharded:
            ledger.new(_FLOAT * self._span, _PART)  # master weights
        self._averaged: Memory | None = None
        self._momentum: Memory | None = None

    @property
    def num_steps(self) -> int:
        """Steps until every kind of step was there."""
        return 2 if self._switches_after is None else self._switches_after + 2

    def update(self) -> None:
        """The optimizer's part of a step."""
        self._count += 1
        switches_after = self._switches_after
        if switches_after is not None and self._count > switches_after:
            self._send_codes()
            return
        if self._is_sharded:
            if self._averaged is None:
                self._averaged = self._new(_FLOAT * self._span)
            self.ledger.pass_by(_FLOAT * self._padded, _PART)  # parameters from their owners
        if self._count == switches_after:
            self._switch()

    def _new(self, num_bytes: int) -> Memory:
        return self.ledger.new(num_bytes, _PART)

    def _switch(self) -> None:
        """The second moment becomes the preconditioner; errors and codes are made."""
        ledger = self.ledger
        momentum, variance = self._moments
        masks = self._new(self._span)
        factors = self._new(_HALF * self._span)
        if self._is_sharded:  # every rank codes all of its gradient
            self._new(_HALF * self._padded)
            ledger.drop(factors)
            whole_momentum = self._new(_FLOAT * self._padded)
            ledger.drop(momentum)
            momentum = whole_momentum
        moves = self._new(self._span)  # which coordinates do, and each bit's value
        ledger.pass_by(self._span, _PART)
        self._new(self._span // 8)
        ledger.drop(moves)
        ledger.drop(self._averaged)
        self._averaged = None
        self._new(_FLOAT * self._padded)  # worker's error
        if self._has_group:
            self._new(_FLOAT * self._chunk)  # server's error
        self._new(self._padded // 8 + _FLOAT * self._padded // BLOCK_SIZE)  # codes
        ledger.drop(variance, masks)
        self._momentum = momentum
        self.stop_summing()

    def _send_codes(self) -> None:
        """One step of stage 2."""
        ledger = self.ledger
        if self._momentum is not None:  # the first: it is float32 still, and so it is coded
            ledger.pass_by(2 * _FLOAT * self._largest, _PART)
        codes = self._padded // 8 + _FLOAT * self._padded // BLOCK_SIZE
        rows = [self._new(codes) for _ in range(2 if self._has_group else 0)]
        if self._is_sharded:
            values = [self._new(_FLOAT * self._padded) for _ in range(2)]
            ledger.drop(*values)
        ledger.drop(*rows, self._momentum)
        self._momentum = None
