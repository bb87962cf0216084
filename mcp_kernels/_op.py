"""One way to define an op: the plain-PyTorch reference is the op, fast bodies replace it.

``define_op`` puts a schema, a reference, a fake and (where there is one) a backward under the
namespace ``mcp_kernels``. The reference is registered on ``CompositeExplicitAutograd``; a compiled
body on the CPU or CUDA key (``STABLE_TORCH_LIBRARY_IMPL`` in C++, ``override`` for Triton) takes
its place the moment it is registered. No dispatcher of our own and no ``if HAS_EXT``.

An op may have a ``General`` body besides: plain PyTorch too, for every device, in another order of
work. It takes what no device's own body took, and leaves the rest to the reference.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import _C
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from mcp_kernels._transforms import function_of, refuse_jvp, sample_by_sample

NAMESPACE = "mcp_kernels"

_log = logging.getLogger(__name__)
_library = torch.library.Library(NAMESPACE, "DEF")


@dataclass(frozen=True, slots=True)
class General:
    """A body for every device, between those of a device and the reference."""

    backend: str
    """What ``which_backend`` calls it."""
    body: Callable[..., Any]
    """A function with the op's signature."""
    refuses: Callable[..., str | None]
    """The reason in words why ``body`` does not take a call, the same on every rank, or None."""


@dataclass(frozen=True, slots=True)
class OpDefinition:
    """What ``define_op`` was given, kept for ``reference_only`` and ``which_backend``."""

    name: str
    schema: str
    reference: Callable[..., Any]
    source_file: str
    """The file that calls ``define_op``: its test and its bench have the same name."""
    general: General | None = None
    no_gradient: str = ""
    """The way out where inputs ask for a gradient that there is not."""

    def without_device_body(self, args: Any, kwargs: Any) -> tuple[str, Callable[..., Any]]:
        """What runs where no device's own body does: its name, and the function."""
        general = self.general
        if general is None or general.refuses(*args, **kwargs) is not None:
            return "the reference", self.reference
        return general.backend, general.body


@dataclass(frozen=True, slots=True)
class Override:
    """A body registered from Python in place of a reference, kept for ``which_backend``."""

    backend: str
    refuses: Callable[..., str | None] | None


_is_looking = False
definitions: dict[str, OpDefinition] = {}
overrides: dict[tuple[str, str], Override] = {}
_logged_refusals: set[tuple[str, str, str, str]] = set()


def define_op(
    schema: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
    vmap: Callable[..., Any] | None = None,
    under_transforms: Callable[..., Any] | None = None,
    no_gradient: str = "",
    tags: Sequence[torch.Tag] = (),
    general: General | None = None,
) -> OpDefinition:
    """Define ``mcp_kernels::<op>`` from its schema, with ``reference`` as its body everywhere.

    Args:
        schema: ``"op(Tensor x, Tensor(a!) state) -> Tensor"``, as ``torch.library`` takes it.
        reference: the definition, in plain PyTorch. It runs below autograd, so a gradient is
            written as explicit formulas in ``backward``, never left to tracing.
        fake: returns empty tensors of the right shapes, dtypes and strides for tracing.
        backward: ``backward(ctx, *grads) -> input grads``, as ``torch.library.register_autograd``.
        setup_context: ``setup_context(ctx, inputs, output)``, saves what ``backward`` needs.
        vmap: ``vmap(info, in_dims, *args) -> (outputs, out_dims)``, as
            ``torch.library.register_vmap``; None calls the op sample by sample.
        under_transforms: what torch.func calls in place of an op with a backward, where it takes
            lists, which no ``autograd.Function`` follows; None makes it.
        no_gradient: the way out of an op that has no backward and refuses, in words, inputs that
            ask for one; without it such an op cuts the graph as ``detach`` does.
        tags: ``torch.Tag`` values for the op.
        general: a body that goes before the reference on every device.

    Returns:
        The definition; call the op as ``torch.ops.mcp_kernels.<op>``.
    """
    name = schema.split("(", 1)[0].strip()
    _library.define(schema, tags=tuple(tags))
    definition = OpDefinition(
        name=name,
        schema=schema,
        reference=_without_autocast(reference),
        source_file=sys._getframe(1).f_code.co_filename,
        general=None if general is None else replace(general, body=_without_autocast(general.body)),
        no_gradient=no_gradient,
    )
    _library.impl(name, _anywhere(definition), "CompositeExplicitAutograd")
    qualified = f"{NAMESPACE}::{name}"
    torch.library.register_fake(qualified, fake, lib=_library)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    rule = vmap or sample_by_sample(op)
    torch.library.register_vmap(qualified, rule, lib=_library)
    if backward is not None:
        _register_autograd(op, backward, setup_context)
        transformed = under_transforms or function_of(name, op, backward, setup_context, rule)
        _library.impl(name, transformed, "FuncTorchDynamicLayerFrontMode")
    elif no_gradient:
        _library.impl(name, _make_refusing_body(op, no_gradient), "Autograd", with_keyset=True)
    definitions[name] = definition
    return definition


def _anywhere(definition: OpDefinition) -> Callable[..., Any]:
    """What runs on a device without a body of its own."""
    if definition.general is None:
        return definition.reference

    def run(*args: Any, **kwargs: Any) -> Any:
        _, body = definition.without_device_body(args, kwargs)
        return body(*args, **kwargs)

    return run


def _register_autograd(
    op: torch._ops.OpOverload,
    backward: Callable[..., Any],
    setup_context: Callable[..., None] | None,
) -> None:
    name = op._opname
    body = _make_autograd_body(op, backward, setup_context)
    if body is not None:
        _library.impl(name, body, "Autograd", with_keyset=True)
    else:
        torch.library.register_autograd(
            f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_library
        )


def _make_autograd_body(
    op: torch._ops.OpOverload,
    backward: Callable[..., Any],
    setup_context: Callable[..., None] | None,
) -> Callable[..., Any] | None:
    """What ``torch.library.register_autograd`` generates, at a third of its cost; ``with_keyset``.

    torch's own body looks up each argument's default in the op's schema at each call, which for an
    op of fourteen arguments takes longer than a small attention call. Here the schema is read once.

    Args:
        op: arguments and results are tensors, scalars or None.
        backward: ``backward(ctx, *grads) -> input grads``.
        setup_context: ``setup_context(ctx, inputs, output)``.

    Returns:
        The body; None where torch's own is needed: for lists and for keyword-only arguments, and
        to refuse an op that writes to its arguments.

    Cost: about 12 microseconds where a gradient is wanted, 3 where not.
    """
    name, arguments = op._opname, op._schema.arguments
    kinds = [str(a.type) for a in (*arguments, *op._schema.returns)]
    has_lists = any("List[" in kind for kind in kinds)
    if has_lists or op._schema.is_mutable or any(a.kwarg_only for a in arguments):
        return None
    # The dispatcher leaves out arguments at the end that equal their defaults.
    defaults = tuple(a.default_value if a.has_default_value() else None for a in arguments)
    below_autograd = _C._after_autograd_keyset

    def forward(ctx: Any, *args: Any) -> Any:
        keyset, args = args[-1], args[:-1]
        with _C._AutoDispatchBelowAutograd():
            result = op.redispatch(keyset & below_autograd, *args)
            if setup_context is not None:
                setup_context(ctx, (*args, *defaults[len(args) :]), result)
        return result

    def run_backward(ctx: Any, *grads: Any) -> Any:
        needs = ctx.needs_input_grad
        ctx.needs_input_grad = needs[:-1]  # without the key set
        try:
            result = backward(ctx, *grads)
        finally:
            ctx.needs_input_grad = needs
        return (*result, None) if isinstance(result, tuple) else (result, None)

    function: Any = type(
        f"{op._opname}_backward",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(run_backward)},
    )

    def body(keyset: _C.DispatchKeySet, *args: Any) -> Any:
        _refuse_tangents(name, args)
        if _C.is_grad_enabled() and _C._any_requires_grad(*args):
            return function.apply(*args, keyset)
        with _C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & below_autograd, *args)

    return body


def _make_refusing_body(op: torch._ops.OpOverload, way_out: str) -> Callable[..., Any]:
    """What stands above an op without a derivative; it sees every transform, one at a time."""
    names = [argument.name for argument in op._schema.arguments]

    def body(keyset: _C.DispatchKeySet, *args: Any) -> Any:
        _refuse_tangents(op._opname, args)
        if _C.is_grad_enabled():
            for name, arg in zip(names, args, strict=False):
                if isinstance(arg, torch.Tensor) and arg.requires_grad:
                    raise RuntimeError(
                        f"{op._opname}: {name} must not require grad, the op has no backward, got "
                        f"one that does; {way_out}"
                    )
        with _C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & _C._after_autograd_keyset, *args)

    return body


def call(op: torch._ops.OpOverload, *args: Any) -> Any:
    """``op(*args)``, straight to the body below autograd where no gradient can be wanted.

    Cost: saves the 5 to 10 microseconds of passing the arguments through the autograd body.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return op(*args)
    _refuse_tangents(op._opname, args)
    with _C._AutoDispatchBelowAutograd():
        return op(*args)


def _refuse_tangents(name: str, args: Sequence[Any]) -> None:
    """Below autograd a tangent would be lost, as if the derivative were zero."""
    if forward_ad._current_level < 0:
        return
    for arg in args:
        if isinstance(arg, torch.Tensor) and forward_ad.unpack_dual(arg).tangent is not None:
            refuse_jvp(name, definitions[name].no_gradient)


def _without_autocast(body: Callable[..., Any]) -> Callable[..., Any]:
    """``body`` in the dtypes it is given: below an op, autocast would still cast every matmul."""

    @functools.wraps(body)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisableAutocast():
            return body(*args, **kwargs)

    return run


def override(
    name: str,
    body: Callable[..., Any] | str,
    key: str,
    *,
    backend: str = "triton",
    refuses: Callable[..., str | None] | None = None,
) -> None:
    """Register ``body`` for ``mcp_kernels::<name>`` on one dispatch key, in place of the reference.

    Args:
        name: the op, defined before.
        body: a function with the op's signature, or ``"module:function"``, imported at the first
            call (a body that imports Triton costs nothing until it runs).
        key: dispatch key, "CPU" or "CUDA".
        backend: what ``which_backend`` calls it.
        refuses: ``refuses(*args, **kwargs)`` gives the reason in words why ``body`` cannot take a
            call, or None. A refused call runs the op's general body, or the reference, and is
            logged once for each reason.
    """
    run = _import_at_first_call(body) if isinstance(body, str) else body
    if refuses is not None:
        run = _with_refusal(definitions[name], run, backend, refuses)
    overrides[name, key] = Override(backend=backend, refuses=refuses)
    _library.impl(name, run, key)


def has_body(name: str, key: str) -> bool:
    """Whether a body other than the reference is registered for ``name`` on ``key``."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", key)


def _import_at_first_call(path: str) -> Callable[..., Any]:
    module, function = path.split(":")

    def run(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), function)(*args, **kwargs)

    return run


def _with_refusal(
    definition: OpDefinition,
    body: Callable[..., Any],
    backend: str,
    refuses: Callable[..., str | None],
) -> Callable[..., Any]:
    @functools.wraps(body)
    def run(*args: Any, **kwargs: Any) -> Any:
        reason = refuses(*args, **kwargs)
        if reason is None:
            return body(*args, **kwargs)
        instead, other = definition.without_device_body(args, kwargs)
        refusal = (definition.name, backend, reason, instead)
        if refusal not in _logged_refusals:
            _logged_refusals.add(refusal)
            _log.warning("%s: %s refuses (%s); %s runs instead", *refusal)
        return other(*args, **kwargs)

    return run


@contextmanager
def looking() -> Iterator[None]:
    """Inside the block ``refuses`` is asked on behalf of a reader: it must not communicate."""
    global _is_looking
    before, _is_looking = _is_looking, True
    try:
        yield
    finally:
        _is_looking = before


def is_looking() -> bool:
    """Whether ``which_backend`` asks, not a call."""
    return _is_looking


class ReferenceMode(TorchDispatchMode):
    """Sends every op of ours to its reference; ``reference_only`` is the public way in."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace == NAMESPACE:
            definition = definitions.get(func._schema.name.split("::", 1)[1])
            if definition is not None:
                return definition.reference(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def reference_only() -> Iterator[None]:
    """Run every ``mcp_kernels`` op on its reference inside this block, whatever else is built.

    Cost: a few microseconds for each op of any kind, as for any ``TorchDispatchMode``.
    """
    with ReferenceMode():
        yield
