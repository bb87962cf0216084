"""A vision transformer's block and ends as allocations, in the order they happen. No torch.

Each line stands for one of ``model/vit.py``, as in ``block.py`` and ``ends.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mcp_parallel.memory.block import BlockPass, GiveGradient
from mcp_parallel.memory.ledger import Ledger, Memory
from mcp_parallel.memory.sizes import Sizes


class ImageBlockPass(BlockPass):
    """One micro-batch's way through one block: LayerNorm, GELU, biases, no rotary positions."""

    _inner_inputs = ("u",)
    _norm_adds = False
    _turns = False
    _row_scales = 2

    @staticmethod
    def weights(sizes: Sizes) -> dict[str, int]:
        """See ``BlockPass.weights``; a bias of a layer that is cut by inputs is whole."""
        d, q, kv, f = sizes.hidden, sizes.q_width, sizes.kv_width, sizes.ffn
        norms = {f"{norm}.{part}": d for norm in ("attn_norm", "ffn_norm") for part in "wb"}
        attention = {"wq": q * d, "wq.b": q, "wk": kv * d, "wv": kv * d, "wv.b": kv}
        attention |= {"wo": q * d, "wo.b": d}
        return {**norms, **attention, "w1": f * d, "w1.b": f, "w2": f * d, "w2.b": d}

    def _run(self, x: Memory, save: Callable[..., None] | None) -> Memory:
        s, ledger = self.sizes, self.ledger
        cut, whole, inner = s.cut_tokens * s.hidden, s.tokens * s.hidden, s.tokens * s.ffn
        y = self._attention(save)
        x2 = self._new(cut)
        ledger.drop(y)
        if save is not None:
            save("x2", x2, cut)
        n2 = self._norm("2", save)
        seen = self._gather("n2", n2, save)
        u = self._new(inner)
        ledger.drop(seen)
        product = self._new(inner)
        if save is not None:
            save("u", u, inner)
            save("product", product, inner, recipe=True)
        ledger.drop(u)
        y = self._row_parallel(whole, cut)
        ledger.drop(product, n2)
        x3 = self._new(cut)
        ledger.drop(y, x2)
        return x3

    def _gate_backward(self, d_product: Memory) -> list[tuple[str, Memory]]:
        inner = self.sizes.tokens * self.sizes.ffn
        u, d_u = self._restore("u", inner), self._new(inner)
        self.ledger.drop(u, d_product)
        self._forget("u")
        return [("w1", d_u)]

    def _weight(self, weight: str, x: Memory, d_y: Memory, give: GiveGradient) -> None:
        super()._weight(weight, x, d_y, give)
        if f"{weight}.b" in self._elements:  # is never put off
            give(f"{weight}.b", self._elements[f"{weight}.b"])


@dataclass
class ImageHeadPass:
    """One micro-batch's last norm, mean over patches, head and loss.

    Args:
        ledger: what is counted in.
        sizes: of the rank.
        recompute: nothing to do with it: logits are few.
    """

    ledger: Ledger
    sizes: Sizes
    recompute: bool

    def forward(self, x: Memory) -> Memory:
        """The logits; ``x`` is saved."""
        s, ledger = self.sizes, self.ledger
        self._x = ledger.hold(x)
        self._scale = ledger.new(2 * s.cut_tokens * max(4, s.compute_bytes))
        normed = ledger.new(s.compute_bytes * s.cut_tokens * s.hidden)
        self._pooled = ledger.new(s.compute_bytes * s.samples * s.hidden)
        ledger.drop(normed)
        return self._logits()

    def _logits(self) -> Memory:
        return self.ledger.new(self.sizes.samples * self.sizes.vocab * 4, "logits")

    def loss(self, logits: Memory) -> None:
        """The loss keeps probabilities."""
        del logits  # the caller's
        self._probabilities = self._logits()

    def backward(self, give_kept: GiveGradient, give: GiveGradient) -> Memory:
        """See ``HeadPass.backward``."""
        s, ledger = self.sizes, self.ledger
        d_logits = self._logits()
        ledger.drop(self._probabilities)
        give_kept("head", s.vocab * s.hidden)
        give("head_b", s.vocab)
        d_pooled = ledger.new(s.compute_bytes * s.samples * s.hidden)
        ledger.drop(d_logits, self._pooled)
        # Each position's gradient is the mean's; the norm writes them out.
        d_normed = ledger.new(s.compute_bytes * s.cut_tokens * s.hidden)
        d_x = ledger.new(s.compute_bytes * s.cut_tokens * s.hidden)
        give("norm", s.hidden)
        give("norm_b", s.hidden)
        ledger.drop(d_normed, d_pooled, self._x, self._scale)
        return d_x


def patches_forward(ledger: Ledger, s: Sizes) -> Memory:
    """The first stage's input to its blocks: a rank embeds its own patches."""
    product = ledger.new(s.compute_bytes * s.cut_tokens * s.hidden)
    x = ledger.new(s.compute_bytes * s.cut_tokens * s.hidden)
    ledger.drop(product)
    return x


def patches_backward(ledger: Ledger, s: Sizes, d_x: Memory, give: GiveGradient) -> None:
    """Gradients of the linear layer and of positions; takes over ``d_x``."""
    for name, elements in patch_weights(s).items():
        give(name, elements)
    ledger.drop(d_x)


def patch_weights(s: Sizes) -> dict[str, int]:
    """Weights of the first layer, whole on every rank."""
    d = s.hidden
    return {"patches": s.patch_values * d, "patches_b": d, "positions": s.seq_len * d}


def image_ends(
    s: Sizes, *, has_embedding: bool, has_head: bool, is_tied: bool = False
) -> dict[str, int]:
    """Elements of the weights of a stage that are in no block."""
    del is_tied  # there is no table
    found = patch_weights(s) if has_embedding else {}
    if has_head:
        found |= {"norm": s.hidden, "norm_b": s.hidden}
        found |= {"head": s.vocab * s.hidden, "head_b": s.vocab}
    return found
