"""One block's forward and backward as allocations, in the order they happen: Llama's. No torch.

Each line stands for one of ``model/llama.py``, ``model/stage.py`` or of the gradients of its
operations. Tensors are named as there; ``d_x`` is the gradient of x.
"""

from __future__ import annotations

from collections.abc import Callable

from mcp_parallel.memory.kept import Keeping
from mcp_parallel.memory.ledger import Ledger, Memory
from mcp_parallel.memory.sizes import Sizes

GiveGradient = Callable[[str, int], None]
"""(weight, elements): a weight's gradient was made."""


class _Saved:
    """A tensor that autograd keeps: raw, packed, or as a recipe."""

    def __init__(self, raw: Memory | None, packed: Memory | None) -> None:
        self.raw, self.packed = raw, packed


class BlockPass:
    """One micro-batch's way through one block; Llama's, and what other families share with it.

    Args:
        ledger: what is counted in.
        sizes: of the rank.
        keeping: what happens to what is saved.
    """

    def __init__(self, ledger: Ledger, sizes: Sizes, keeping: Keeping) -> None:
        self.ledger, self.sizes, self.keeping = ledger, sizes, keeping
        self._saved: dict[str, _Saved] = {}
        self._later: list[tuple[str, list[Memory]]] | None = None
        self._elements = self.weights(sizes)

    @staticmethod
    def weights(sizes: Sizes) -> dict[str, int]:
        """Elements of each weight of a block on this rank, by name, in order of registration."""
        d = sizes.hidden
        return {
            "attn_norm": d,
            "wq": sizes.q_width * d,
            "wk": sizes.kv_width * d,
            "wv": sizes.kv_width * d,
            "wo": sizes.q_width * d,
            "ffn_norm": d,
            "w1": sizes.ffn * d,
            "w3": sizes.ffn * d,
            "w2": sizes.ffn * d,
        }

    # --- forward --------------------------------------------------------------------------------

    def forward(self, x: Memory, *, x_is_held: bool = False) -> Memory:
        """The block's result; the caller keeps ``x`` until then.

        ``x_is_held``: somebody keeps it for the whole backward anyway (a stage's input).
        """
        if self.keeping.policy != "full":
            return self._forward(x, x_is_held=x_is_held)
        if x_is_held:
            self._saved["x"] = _Saved(self.ledger.hold(x), None)
        else:
            self._save("x", x, self.sizes.cut_tokens * self.sizes.hidden)
        return self._run(x, None)

    def _forward(self, x: Memory, *, x_is_held: bool) -> Memory:
        elements = self.sizes.cut_tokens * self.sizes.hidden
        if x_is_held:
            self._saved["x"] = _Saved(self.ledger.hold(x), None)
        else:
            self._save("x", x, elements)
        return self._run(x, self._save)

    def _run(self, x: Memory, save: Callable[..., None] | None) -> Memory:
        """The operations of the block; ``save`` None keeps nothing."""
        s, ledger = self.sizes, self.ledger
        cut, whole = s.cut_tokens * s.hidden, s.tokens * s.hidden
        y = self._attention(save)
        x2 = self._new(cut)  # of one operation with its norm
        if save is not None:
            save("x2", x2, cut)
        n2 = self._norm("2", save)
        ledger.drop(y)
        seen = self._gather("n2", n2, save)
        gate, up = self._new(s.tokens * s.ffn), self._new(s.tokens * s.ffn)
        ledger.drop(seen)
        product = self._new(s.tokens * s.ffn)
        if save is not None:
            save("gate", gate, s.tokens * s.ffn)
            save("up", up, s.tokens * s.ffn)
            save("product", product, s.tokens * s.ffn, recipe=True)
        y = self._row_parallel(whole, cut)
        ledger.drop(gate, up, product, n2)
        x3 = self._new(cut)
        ledger.drop(y, x2)
        return x3

    def _attention(self, save: Callable[..., None] | None) -> Memory:
        """The first norm and attention; its result before it is added."""
        s, ledger = self.sizes, self.ledger
        q_elements, kv_elements = s.tokens * s.q_width, s.tokens * s.kv_width
        n1 = self._norm("1", save)
        seen = self._gather("n1", n1, save)
        q, k, v = self._new(q_elements), self._new(kv_elements), self._new(kv_elements)
        ledger.drop(seen)
        if self._turns:
            turned_q, turned_k = self._new(q_elements), self._new(kv_elements)
            ledger.drop(q, k)
            q, k = turned_q, turned_k
        everyones = self._gathered_keys(kv_elements)
        out = self._new(q_elements)
        ledger.drop(*everyones)
        lse = ledger.new(s.samples * s.heads * (s.tokens // s.samples) * max(4, s.compute_bytes))
        if save is not None:
            save("q", q, q_elements)
            save("k", k, kv_elements)
            save("v", v, kv_elements)
            save("out", out, q_elements)
            save("lse", lse, None)
        ledger.drop(lse)
        y = self._row_parallel(s.tokens * s.hidden, s.cut_tokens * s.hidden)
        ledger.drop(q, k, v, out, n1)
        return y

    def _gathered_keys(self, kv_elements: int) -> list[Memory]:
        """Keys and values of all ranks that share a sequence (``context/gather.py``)."""
        if self.sizes.gathers_from == 1:
            return []
        whole, found = self.sizes.gathers_from * kv_elements, []
        for _ in "kv":
            arrived = self._new(whole)
            joined = self._new(whole)
            self.ledger.drop(arrived)
            late = self._new(whole // 2)
            found.append(self._new(whole))  # in the order of the sequence
            self.ledger.drop(joined, late)
        return found

    def _gradients_of_gathered(self, q_elements: int, kv_elements: int) -> None:
        """What the backward pass of attention over gathered keys has for a moment."""
        s, ledger = self.sizes, self.ledger
        if s.gathers_from == 1:
            return
        whole = s.gathers_from * kv_elements
        held = self._gathered_keys(kv_elements)
        held += [ledger.new(whole * max(4, s.compute_bytes)) for _ in "kv"]  # sums
        held += [self._new(q_elements), self._new(whole), self._new(whole)]  # of one call
        packed = [ledger.new(whole * max(4, s.compute_bytes)) for _ in range(2)]
        ledger.drop(*held, *packed)

    def _norm(self, number: str, save: Callable[..., None] | None) -> Memory:
        s = self.sizes
        scale = self.ledger.new(self._row_scales * s.cut_tokens * max(4, s.compute_bytes))
        normed = self._new(s.cut_tokens * s.hidden)
        if save is not None:
            save(f"scale{number}", scale, None)
        self.ledger.drop(scale)
        return normed

    def _gather(self, name: str, normed: Memory, save: Callable[..., None] | None) -> Memory:
        """What column-parallel layers multiply: the norm's result, gathered or as it is."""
        s = self.sizes
        whole = s.tokens * s.hidden
        if s.sequence_parallel:
            gathered = self._new(whole)
            if save is not None:
                save(name, gathered, whole)
            return gathered
        if save is not None:
            save(name, normed, whole, recipe=True)
        return self.ledger.hold(normed)

    def _row_parallel(self, whole: int, cut: int) -> Memory:
        """The product of all features, and what the sum over tp leaves of it."""
        if self.sizes.tp == 1:
            return self._new(whole)
        product = self._new(whole)
        if not self.sizes.sequence_parallel:
            return product
        part = self._new(cut)
        self.ledger.drop(product)
        return part

    # --- saving ---------------------------------------------------------------------------------

    def _new(self, elements: int) -> Memory:
        return self.ledger.new(elements * self.sizes.compute_bytes)

    def _save(self, name: str, raw: Memory, elements: int | None, *, recipe: bool = False) -> None:
        """Keep a tensor for backward; ``elements`` None stays exact."""
        if recipe and self.keeping.policy == "selective":
            self._saved[name] = _Saved(None, None)
            return
        packed = None
        if elements is not None:
            packed = self.keeping.packed_bytes(elements, self.sizes.compute_bytes)
        if packed is None:
            self._saved[name] = _Saved(self.ledger.hold(raw), None)
        else:
            self._saved[name] = _Saved(None, self.ledger.new(packed))

    _inner_inputs: tuple[str, ...] = ("gate", "up")
    """What "product", the input of the feed-forward's last layer, is made of: silu(gate) * up."""

    def _restore(self, name: str, elements: int) -> Memory:
        """The tensor as backward sees it, one more holder of it."""
        saved = self._saved[name]
        if saved.raw is not None:
            return self.ledger.hold(saved.raw)
        if saved.packed is None and name == "product":
            factors = [self._restore(factor, elements) for factor in self._inner_inputs]
            made = self._new(elements)
            self.ledger.drop(*factors)
            return made
        if saved.packed is None:  # a norm of x
            x = self._restore("x" if name == "n1" else "x2", elements)
            made = self._norm("", None)
            self.ledger.drop(x)
            return made
        return self._new(elements)

    def _forget(self, *names: str) -> None:
        for name in names:
            saved = self._saved.pop(name)
            self.ledger.drop(saved.raw, saved.packed)

    # --- backward -------------------------------------------------------------------------------

    def backward(self, d_x3: Memory, give: GiveGradient) -> Memory:
        """Gradient of the block's input; takes over ``d_x3``."""
        if self.keeping.policy == "full":
            self._recompute()
        ledger, inner = self.ledger, self.sizes.tokens * self.sizes.ffn

        d_y = self._gathered_gradient(d_x3)
        product = self._restore("product", inner)
        d_product = self._new(inner)
        self._weight("w2", product, d_y, give)
        ledger.drop(product, d_y)
        self._forget("product")
        d_n2 = self._column_backward("n2", self._gate_backward(d_product), give)
        d_x2 = self._norm_backward("2", d_n2, d_x3, give)
        return self._attention_backward(d_x2, give)

    def _gate_backward(self, d_product: Memory) -> list[tuple[str, Memory]]:
        """Gradients of what the matrices up gave, by their weights; takes over ``d_product``."""
        inner = self.sizes.tokens * self.sizes.ffn
        gate, up = self._restore("gate", inner), self._restore("up", inner)
        d_gate, d_up = self._new(inner), self._new(inner)
        self.ledger.drop(gate, up, d_product)
        self._forget("gate", "up")
        return [("w3", d_up), ("w1", d_gate)]

    def _attention_backward(self, d_x2: Memory, give: GiveGradient) -> Memory:
        s, ledger = self.sizes, self.ledger
        d_y = self._gathered_gradient(d_x2)
        q_elements, kv_elements = s.tokens * s.q_width, s.tokens * s.kv_width
        out = self._restore("out", q_elements)
        d_out = self._new(q_elements)
        self._weight("wo", out, d_y, give)
        ledger.drop(d_y)
        rest = [self._restore("q", q_elements)]
        rest += [self._restore(name, kv_elements) for name in ("k", "v")]
        self._gradients_of_gathered(q_elements, kv_elements)
        d_q, d_k, d_v = self._new(q_elements), self._new(kv_elements), self._new(kv_elements)
        ledger.drop(d_out, out, *rest)
        self._forget("q", "k", "v", "out", "lse")
        if self._turns:
            turned_q, turned_k = self._new(q_elements), self._new(kv_elements)
            ledger.drop(d_q, d_k)
            d_q, d_k = turned_q, turned_k
        d_n1 = self._column_backward("n1", [("wv", d_v), ("wk", d_k), ("wq", d_q)], give)
        return self._norm_backward("1", d_n1, d_x2, give)

    def _recompute(self) -> None:
        """Run the block again under the policy "none", without compression."""
        s = self.sizes
        x = self._restore("x", s.cut_tokens * s.hidden)
        kept = self._saved.pop("x")
        plain = type(self)(self.ledger, s, Keeping("none", "none"))
        # It stops where the last saved tensor is made: the block's result never is.
        plain._saved["x"] = _Saved(x, None)
        self.ledger.drop(plain._run(x, plain._save))
        self._saved = plain._saved
        self._saved["input"] = kept

    def _gathered_gradient(self, d_y: Memory) -> Memory:
        if not self.sizes.sequence_parallel:
            return self.ledger.hold(d_y)
        return self._new(self.sizes.tokens * self.sizes.hidden)

    def _column_backward(
        self, name: str, outputs: list[tuple[str, Memory]], give: GiveGradient
    ) -> Memory:
        """Gradient of the input of layers that share it, gathered or not."""
        s, ledger = self.sizes, self.ledger
        whole = s.tokens * s.hidden
        total: Memory | None = None
        x = self._restore(name, whole)
        if s.sequence_parallel:  # one operation for all of them
            total = self._new(whole)
            for weight, grad in outputs:
                self._weight(weight, x, grad, give)
            part = self._new(s.cut_tokens * s.hidden)
            ledger.drop(*(grad for _, grad in outputs), total, x)
            self._forget(name)
            return part
        for weight, grad in outputs:
            d_x = self._new(whole)
            self._weight(weight, x, grad, give)
            ledger.drop(grad)
            if total is None:
                total = d_x
            else:
                ledger.drop(d_x)  # added in place
        ledger.drop(x)
        self._forget(name)
        assert total is not None
        return total

    def _norm_backward(
        self, number: str, d_y: Memory, d_residual: Memory, give: GiveGradient
    ) -> Memory:
        """Gradient of a norm's input plus that of the residual branch, which it is added to."""
        s, ledger = self.sizes, self.ledger
        elements = s.cut_tokens * s.hidden
        name = "x" if number == "1" else "x2"
        x = self._restore(name, elements)
        d_x = self._new(elements)
        self._give_all("attn_norm" if number == "1" else "ffn_norm", give)
        ledger.drop(d_y, x)
        # Llama's second norm adds the other gradient itself; otherwise one is added to the other in
        # place, unless the gradient of a weight that comes later is made of it as it is.
        if (number == "2" and self._norm_adds) or d_residual.holders > 1:
            d_residual, d_x = d_x, d_residual
        ledger.drop(d_x)
        self._forget(name, f"scale{number}")
        if number == "1" and "input" in self._saved:
            self._forget("input")
        return d_residual

    _row_scales = 1
    """Numbers that a norm keeps of each position."""
    _norm_adds = True
    """The second norm takes the sum before it along, and its gradient."""
    _turns = True
    """Queries and keys are turned by their positions."""

    def _give_all(self, layer: str, give: GiveGradient) -> None:
        """The gradients of a layer that has no matrix."""
        for weight, elements in self._elements.items():
            if weight.partition(".")[0] == layer:
                give(weight, elements)

    # --- a backward in two passes ---------------------------------------------------------------

    def input_backward(self, d_x3: Memory, give: GiveGradient) -> Memory:
        """As ``backward``, but for the linear layers' weights: their products come later.

        Each of them keeps both of its factors.
        """
        self._later = []
        return self.backward(d_x3, give)

    def weight_backward(self, give: GiveGradient) -> None:
        """Gradients of the weights that ``input_backward`` left out."""
        assert self._later is not None
        for weight, factors in self._later:
            give(weight, self._elements[weight])
            self.ledger.drop(*factors)

    def _weight(self, weight: str, x: Memory, d_y: Memory, give: GiveGradient) -> None:
        """The gradient of a linear layer's weight, now or later."""
        if self._later is None:
            give(weight, self._elements[weight])
        else:
            self._later.append((weight, [self.ledger.hold(x), self.ledger.hold(d_y)]))
