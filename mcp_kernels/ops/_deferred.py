"""Weight gradients put off: a backward that computes input gradients now and the others later.

Pipeline schedules without a bubble (Qi et al., "Zero Bubble Pipeline Parallelism", 2023) run the
two halves of a backward at different times. Cutting the graph in two makes every node that gives
both gradients run twice; here each op of ours is asked once, hands out its input gradient and
leaves the product for its weight with whoever opened ``deferred_weight_gradients``. Both halves
together do the work of one backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

_Compute = Callable[[], list[Tensor]]


class WeightGradients:
    """The products that one backward left undone, in the order in which it met them."""

    def __init__(self) -> None:
        self._undone: list[tuple[list[Tensor], _Compute]] = []

    def __len__(self) -> int:
        return len(self._undone)

    def add(self, weights: Sequence[Tensor], compute: _Compute) -> None:
        """Leave for later the gradients of ``weights``, which ``compute`` gives in their order.

        Args:
            weights: the tensors that the forward was given. What a node saved and got back will not
                do: under checkpointing that is a copy without a way to its parameter.
            compute: called once.
        """
        self._undone.append((list(weights), compute))

    def run(self) -> None:
        """Compute what was left and add it to the gradients of the leaves behind the weights.

        A weight may be a view or a cast of a parameter; its values are not read, so they may be
        gone by now (``fully_shard`` frees them). What was run is forgotten.
        """
        undone, self._undone = self._undone, []
        for weights, compute in undone:
            with torch.no_grad():
                gradients = compute()
            torch.autograd.backward(weights, gradients)


# A backward has one caller and one thread or one for each device, all of which must see the same:
# hence a variable of the process and not of the thread.
_open: WeightGradients | None = None


@contextmanager
def deferred_weight_gradients() -> Iterator[WeightGradients]:
    """A backward inside of it leaves the linear layers' weight gradients in what it yields.

    Layers of ``mcp_kernels.nn`` know it, and any other computes all of its gradients at once.
    First derivatives alone: a backward with ``create_graph`` defers nothing.

    Raises:
        RuntimeError: inside of another such block.
    """
    global _open
    if _open is not None:
        raise RuntimeError(
            "deferred_weight_gradients: it must not be inside of another, got two; end the first"
        )
    _open = WeightGradients()
    try:
        yield _open
    finally:
        _open = None


def deferring() -> WeightGradients | None:
    """Where a backward that runs now leaves weight gradients; None: it computes them itself."""
    return None if torch.is_grad_enabled() else _open
