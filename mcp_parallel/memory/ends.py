"""Embedding, last norm, head and loss of a stage as allocations. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from mcp_parallel.memory.block import GiveGradient
from mcp_parallel.memory.ledger import Ledger, Memory
from mcp_parallel.memory.sizes import Sizes

# As in parallel/head_loss.py; a test holds them together.
CHUNK_BYTES = 16 * 2**20
MIN_ROWS = 128
SMALL_BYTES = 4 * 2**20
_INDEX_BYTES = 8


@dataclass
class HeadPass:
    """One micro-batch's last norm, head and loss.

    Args:
        ledger: what is counted in.
        sizes: of the rank.
        recompute: the loss keeps its input and makes the logits again.
    """

    ledger: Ledger
    sizes: Sizes
    recompute: bool

    def forward(self, x: Memory) -> Memory:
        """The last norm's result, which the loss is given; ``x`` is saved."""
        s, ledger = self.sizes, self.ledger
        self._x = ledger.hold(x)
        self._scale = ledger.new(s.cut_tokens * max(4, s.compute_bytes))
        return ledger.new(s.compute_bytes * s.cut_tokens * s.hidden)

    @property
    def _is_small(self) -> bool:
        """Logits go through torch's own ops, whole."""
        s = self.sizes
        num_bytes = s.tokens * s.vocab * s.compute_bytes
        return s.tp == 1 and s.compute_bytes >= 4 and num_bytes <= SMALL_BYTES

    def _logits(self) -> Memory:
        return self.ledger.new(
            self.sizes.tokens * self.sizes.vocab * self.sizes.compute_bytes, "logits"
        )

    def loss(self, normed: Memory) -> None:
        """The loss, and what it keeps: both gradients, its input, or probabilities as well."""
        s, ledger = self.sizes, self.ledger
        if self._is_small:
            logits = self._logits()
            self._kept = [ledger.hold(normed), self._logits()]
            ledger.drop(logits)
            return
        whole = s.compute_bytes * s.tokens * s.hidden
        x = ledger.new(whole) if s.sequence_parallel else ledger.hold(normed)
        self._kept: list[Memory] = []
        if self.recompute:
            self._kept = [ledger.hold(x), ledger.new(2 * s.tokens * max(4, s.compute_bytes))]
            self._chunk()
        else:
            self._kept = [ledger.new(whole)]
            self._kept.append(self._chunk(makes_dw=True))
        ledger.drop(x)

    def _chunk(self, makes_dw: bool = False) -> Memory:
        """The largest chunk's logits, and dW where it is made."""
        s, ledger = self.sizes, self.ledger
        width = max(4, s.compute_bytes)
        rows = min(s.tokens, max(MIN_ROWS, CHUNK_BYTES // max(1, width * s.vocab)))
        z = ledger.new(rows * s.vocab * width, "logits")
        if s.compute_bytes < 4:
            ledger.pass_by(rows * s.vocab * s.compute_bytes, "logits")
        small = ledger.new(rows * (_INDEX_BYTES + 8 * width + 4))
        dw = ledger.new(s.vocab * s.hidden * width if makes_dw else 0, "gradients")
        if makes_dw and s.compute_bytes < 4:
            ledger.pass_by(s.vocab * s.hidden * s.compute_bytes, "gradients")
        ledger.drop(z, small)
        return dw

    def backward(self, give_kept: GiveGradient, give: GiveGradient) -> Memory:
        """Gradient of the last block's result.

        Args:
            give_kept: takes over a weight's gradient that is allocated already.
            give: as for a block.
        """
        s, ledger = self.sizes, self.ledger
        if self._is_small:
            return self._small_backward(give_kept, give)
        if self.recompute:
            x, statistics = self._kept
            self._kept = [ledger.new(s.compute_bytes * s.tokens * s.hidden)]
            self._kept.append(self._chunk(makes_dw=True))
            ledger.drop(x, statistics)
        d_x, dw = self._kept
        ledger.drop(dw)
        give_kept("head", s.vocab * s.hidden)
        if s.sequence_parallel:
            part = ledger.new(s.compute_bytes * s.cut_tokens * s.hidden)
            ledger.drop(d_x)
            d_x = part
        return self._norm_backward(d_x, give)

    def _small_backward(self, give_kept: GiveGradient, give: GiveGradient) -> Memory:
        s, ledger = self.sizes, self.ledger
        normed, log_softmax = self._kept
        d_log_softmax = self._logits()
        d_logits = self._logits()
        ledger.drop(d_log_softmax, log_softmax)
        d_x = ledger.new(s.compute_bytes * s.tokens * s.hidden)
        give_kept("head", s.vocab * s.hidden)
        ledger.drop(d_logits, normed)
        return self._norm_backward(d_x, give)

    def _norm_backward(self, d_x: Memory, give: GiveGradient) -> Memory:
        s, ledger = self.sizes, self.ledger
        elements = s.cut_tokens * s.hidden
        d_x0 = ledger.new(s.compute_bytes * elements)
        give("norm", s.hidden)
        ledger.drop(d_x, self._x, self._scale)
        return d_x0


def embedding_forward(ledger: Ledger, s: Sizes) -> Memory:
    """The first stage's input to its blocks."""
    if s.tp == 1:
        return ledger.new(s.compute_bytes * s.tokens * s.hidden)
    whole = ledger.new(s.compute_bytes * s.tokens * s.hidden)
    part = ledger.new(s.compute_bytes * s.cut_tokens * s.hidden)
    ledger.drop(whole)
    return part


def embedding_backward(ledger: Ledger, s: Sizes, d_x: Memory, give: GiveGradient) -> None:
    """The table's gradient; takes over ``d_x``."""
    whole = None
    if s.sequence_parallel:
        whole = ledger.new(s.compute_bytes * s.tokens * s.hidden)
    if s.compute_bytes < 4:
        ledger.pass_by(4 * s.vocab * s.hidden, "gradients")
    give("embed", s.vocab * s.hidden)
    ledger.drop(d_x, whole)


def text_ends(s: Sizes, *, has_embedding: bool, has_head: bool, is_tied: bool) -> dict[str, int]:
    """Elements of the weights of a stage that are in no block."""
    table = s.vocab * s.hidden
    found: dict[str, int] = {}
    if has_embedding or (has_head and is_tied):
        found["embed"] = table
    if has_head:
        found["norm"] = s.hidden
        if not is_tied:
            found["head"] = table
    return found
