"""Ops under torch.func: what each gets without asking, and how to look under its wrappers.

``torch.vmap``, ``torch.func.grad`` and the rest run on tensors that wrap others, one layer for each
transform around the call. An op without a rule of its own for ``vmap`` is called sample by sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

Result = tuple[Any, Any]
"""(outputs, their mapped dimensions), as ``torch.library.register_vmap`` takes it."""
Rule = Callable[..., Result]
"""``rule(info, in_dims, *args)``, as ``torch.library.register_vmap`` takes it."""


def are_active() -> bool:
    """Whether the caller runs inside a transform of torch.func."""
    return torch._C._are_functorch_transforms_active()


def innermost(tensor: Tensor) -> Tensor:
    """The tensor under all wrappers: the values of every sample together."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def is_batched(tensor: Tensor) -> bool:
    """Whether a ``torch.vmap`` around the caller maps ``tensor``."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


def wants_gradient(tensor: Tensor) -> bool:
    """Whether a gradient of ``tensor`` may be asked for, by autograd or a transform around it.

    ``requires_grad`` speaks of the innermost transform alone, and under ``torch.vmap`` of none.
    """
    if tensor.requires_grad or torch.compiler.is_compiling():
        return tensor.requires_grad
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
        if tensor.requires_grad:
            return True
    return False


def shared(op: str, name: str, tensor: Tensor, way_out: str) -> Tensor:
    """The tensor under all wrappers, where every sample of ``torch.vmap`` has the same.

    Raises:
        ValueError: the samples have values of their own, where one is needed for all.
    """
    if is_batched(tensor):
        raise ValueError(
            f"{op}: {name} must be the same for every sample of torch.vmap, got one for each "
            f"sample; {way_out}"
        )
    return innermost(tensor)


def check_samples(op: str, info: Any) -> None:
    """Hold a mapped call to at least one sample, where a result's shape is that of a sample's.

    Raises:
        ValueError: there is none.
    """
    if info.batch_size == 0:
        raise ValueError(
            f"{op}: the dimension that torch.vmap maps must hold at least one sample, got 0; "
            "leave the call out"
        )


def in_front(tensor: Tensor, dim: int | None, num_samples: int) -> Tensor:
    """``tensor`` with the mapped dimension first; one that all samples share is expanded."""
    if dim is None:
        return tensor.expand(num_samples, *tensor.shape)
    return tensor.movedim(dim, 0)


def loop(op: Any, info: Any, in_dims: Sequence[Any], args: Sequence[Any]) -> Result:
    """Sample by sample, for a call whose samples do not go into one.

    Arguments and results may be lists of tensors; an argument that the op writes to is written to
    through a view of its sample.

    Raises:
        ValueError: there is no sample.
    """
    check_samples(op.__name__.split(".")[0], info)
    flat, spec = tree_flatten(list(args))
    dims = tree_flatten(list(in_dims))[0]
    results: list[list[Any]] = []
    structure: Any = None
    for index in range(info.batch_size):
        sample = [
            arg if dim is None else arg.select(dim, index)
            for arg, dim in zip(flat, dims, strict=True)
        ]
        leaves, structure = tree_flatten(op(*tree_unflatten(sample, spec)))
        results.append(leaves)
    stacked = [
        torch.stack(parts) if isinstance(parts[0], Tensor) else None
        for parts in zip(*results, strict=True)
    ]
    joined = tree_unflatten(stacked, structure)
    return joined, tree_map(lambda leaf: None if leaf is None else 0, joined)


def sample_by_sample(op: torch._ops.OpOverload) -> Rule:
    """The rule of an op that has none of its own: ``loop``, where no sample writes over another."""
    written = [a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write]
    names = [argument.name for argument in op._schema.arguments]

    def rule(info: Any, in_dims: Sequence[Any], *args: Any) -> Result:
        for name, dim, arg in zip(names, in_dims, args, strict=False):
            if name in written and arg is not None and None in tree_flatten(dim)[0]:
                raise ValueError(
                    f"{op._opname}: {name} must be mapped as the other arguments are under "
                    "torch.vmap, for it is written to, got one tensor for all samples; give each "
                    "sample its own, or call in a loop"
                )
        return loop(op, info, in_dims, args)

    return rule


def function_of(
    name: str,
    op: torch._ops.OpOverload,
    backward: Callable[..., Any],
    setup_context: Callable[..., None] | None,
    vmap: Rule,
) -> Callable[..., Any]:
    """The op as torch.func's transforms take it; called before any of them, and by none outside.

    What ``register_autograd`` makes is a ``Function`` without ``setup_context``, which torch itself
    refuses as soon as one transform lies within another: ``vmap(grad(f))``.
    """

    def forward(*args: Any) -> Any:
        return op(*args)

    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_jvp(name)

    members = {"forward": forward, "backward": backward, "vmap": vmap, "jvp": jvp}
    if setup_context is not None:
        members["setup_context"] = setup_context
    namespace = {key: staticmethod(value) for key, value in members.items()}
    function = type(f"TransformsOf_{name}", (torch.autograd.Function,), namespace)
    return function.apply


def refuse_jvp(name: str, way_out: str = "") -> NoReturn:
    """Say that an op has no forward mode, and what to do instead: reverse mode, where it has one.

    Raises:
        NotImplementedError: always.
    """
    reverse = "torch.autograd.grad, torch.func.vjp, grad or jacrev (twice for a Hessian)"
    raise NotImplementedError(
        f"{name}: inputs must have no tangent, the op has no forward-mode derivative, got one; "
        f"{way_out or f'use reverse mode: {reverse}'}"
    )
