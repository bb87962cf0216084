"""One way to define an op: the plain-PyTorch reference is the op, fast bodies replace it by dispatch key.

``define_op`` puts a schema, a reference, a fake and (where there is one) a backward under the
namespace ``mcp_kernels``. The reference is registered on ``CompositeExplicitAutograd``; a compiled
body on the CPU or CUDA key (``TORCH_LIBRARY_IMPL`` in C++, ``override`` for Triton) takes its place
the moment it is registered. There is no dispatcher of our own and no ``if HAS_EXT``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NAMESPACE = "mcp_kernels"

_library = torch.library.Library(NAMESPACE, "DEF")


@dataclass(frozen=True, slots=True)
class OpDefinition:
    """What ``define_op`` was given, kept for ``reference_only`` and ``which_backend``."""

    name: str
    schema: str
    reference: Callable[..., Any]


_definitions: dict[str, OpDefinition] = {}


def define_op(
    schema: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
    tags: Sequence[torch.Tag] = (),
) -> OpDefinition:
    """Define ``mcp_kernels::<op>`` from its schema, with ``reference`` as its body everywhere.

    Args:
        schema: ``"op(Tensor x, Tensor(a!) state) -> Tensor"``, as ``torch.library`` takes it.
        reference: the definition, in plain PyTorch. It runs below autograd, so a gradient is
            written as explicit formulas in ``backward``, never left to tracing.
        fake: returns empty tensors of the right shapes, dtypes and strides for tracing.
        backward: ``backward(ctx, *grads) -> input grads``, as ``torch.library.register_autograd``.
        setup_context: ``setup_context(ctx, inputs, output)``, saves what ``backward`` needs.
        tags: ``torch.Tag`` values for the op.

    Returns:
        The definition; call the op as ``torch.ops.mcp_kernels.<op>``.
    """
    name = schema.split("(", 1)[0].strip()
    _library.define(schema, tags=tuple(tags))
    _library.impl(name, reference, "CompositeExplicitAutograd")
    qualified = f"{NAMESPACE}::{name}"
    torch.library.register_fake(qualified, fake, lib=_library)
    if backward is not None:
        torch.library.register_autograd(
            qualified, backward, setup_context=setup_context, lib=_library
        )
    definition = OpDefinition(name=name, schema=schema, reference=reference)
    _definitions[name] = definition
    return definition


def override(name: str, body: Callable[..., Any], key: str) -> None:
    """Register ``body`` for ``mcp_kernels::<name>`` on dispatch key ``key`` ("CPU" or "CUDA")."""
    _library.impl(name, body, key)


class _ReferenceMode(TorchDispatchMode):
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace == NAMESPACE:
            definition = _definitions.get(func._schema.name.split("::", 1)[1])
            if definition is not None:
                return definition.reference(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def reference_only() -> Iterator[None]:
    """Run every ``mcp_kernels`` op on its reference inside this block, whatever else is built.

    Cost: a few microseconds for each op of any kind, as for any ``TorchDispatchMode``.
    """
    with _ReferenceMode():
        yield
