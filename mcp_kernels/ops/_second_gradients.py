"""The backward of a backward, from the forward formula in differentiable operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]


def second_gradients(
    forward: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    seconds: Sequence[Tensor | None],
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Gradients of ``sum_i <d inputs_i, seconds_i>``, where ``d inputs`` is what backward gave.

    Args:
        forward: the op in torch operations that autograd knows, of ``inputs`` alone.
        inputs: what forward was given.
        grads: what backward was given: the gradient of each result, None where there was none.
        seconds: the gradient of each of backward's results, None where there is none.

    Returns:
        The gradients of ``grads`` and of ``inputs``, which may be differentiated once more.

    Cost: forward, its backward and the backward of that, op by op, with all of it saved.
    """
    if _functorch.peek_interpreter_stack() is not None:
        return _under_transforms(forward, inputs, grads, seconds)
    with torch.enable_grad():
        # Views of what has a graph, so that a third gradient finds it; leaves of what has none.
        own = [_handle(x) for x in inputs]
        own_grads = [None if g is None else _handle(g) for g in grads]
        results = forward(*own)
        results = results if isinstance(results, tuple) else (results,)
        kept = [(y, g) for y, g in zip(results, own_grads, strict=True) if g is not None]
        first = torch.autograd.grad(
            [y for y, _ in kept],
            own,
            [g for _, g in kept],
            create_graph=True,
            allow_unused=True,
        )
        pairs = [
            (f, s)
            for f, s in zip(first, seconds, strict=True)
            if f is not None and s is not None and f.requires_grad
        ]
        targets = [*(g for g in own_grads if g is not None), *own]
        if not pairs:
            return [None] * len(grads), [None] * len(inputs)
        found = torch.autograd.grad(
            [f for f, _ in pairs],
            targets,
            [s for _, s in pairs],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
    left = iter(found)
    of_grads = [None if g is None else next(left) for g in own_grads]
    return of_grads, list(left)


def _under_transforms(
    forward: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    seconds: Sequence[Tensor | None],
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """The same inside of torch.func, whose tensors must not be asked to require a gradient."""
    kept = [i for i, grad in enumerate(grads) if grad is not None]
    wanted = [i for i, second in enumerate(seconds) if second is not None]
    of_grads: list[Tensor | None] = [None] * len(grads)
    if not kept or not wanted:
        return of_grads, [None] * len(inputs)

    def first(*targets: Tensor) -> tuple[Tensor, ...]:
        def results(*own: Tensor) -> tuple[Tensor, ...]:
            found = forward(*own)
            found = found if isinstance(found, tuple) else (found,)
            return tuple(found[i] for i in kept)

        pull = torch.func.vjp(results, *targets[len(kept) :])[1]
        found = pull(targets[: len(kept)])
        return tuple(found[i] for i in wanted)

    pull = torch.func.vjp(first, *(grads[i] for i in kept), *inputs)[1]
    found = pull(tuple(seconds[i] for i in wanted))
    for place, grad in zip(kept, found[: len(kept)], strict=True):
        of_grads[place] = grad
    return of_grads, list(found[len(kept) :])


def _handle(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()
