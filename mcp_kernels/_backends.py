"""Which body of an op would run for given arguments, and why each other one would not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from mcp_kernels._build_info import build_info, cpu_isa_of
from mcp_kernels._op import NAMESPACE, ReferenceMode, definitions, has_body, looking, overrides

REPLACED = "a faster body takes its place; reference_only() runs it"


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The answer of ``which_backend``."""

    op: str
    chosen: str
    """"reference", "cpu:<isa>", "triton", "cuda", "shm", or "overlap": collectives of the group in
    pieces under the product."""
    refused: dict[str, str]
    """Every other body and the reason, in words, why it would not run."""

    def __str__(self) -> str:
        """One line for the choice, one for each refusal."""
        lines = [f"{self.op}: {self.chosen}"]
        return "\n".join(lines + [f"  not {name}: {why}" for name, why in self.refused.items()])


def which_backend(op: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> BackendChoice:
    """Say which body would run for a call, and why each other one refuses. Nothing is computed.

    Args:
        op: a public function of this package, an op (``torch.ops.mcp_kernels.<op>``) or its name.
            A function that calls several ops is judged by the first one.
        *args: what it would be called with; tensors are only looked at.
        **kwargs: as ``args``.

    Returns:
        The chosen body and the reasons of the others.

    Raises:
        ValueError: ``op`` is no op of this package and calls none.
    """
    name, op_args, op_kwargs = _op_call(op, args, kwargs)
    tensors = [t for t in pytree.tree_leaves((op_args, op_kwargs)) if isinstance(t, torch.Tensor)]
    device = tensors[0].device.type if tensors else "cpu"
    refused = {
        "reference": REPLACED,
        "cpu": _cpu_refusal(name, device),
        "triton": _gpu_refusal(name, device, "triton"),
        "cuda": _gpu_refusal(name, device, "cuda"),
    }
    registered = overrides.get((name, device.upper()))
    if registered is not None:
        reason = registered.refuses(*op_args, **op_kwargs) if registered.refuses else None
        refused[registered.backend] = reason or ""
    general = definitions[name].general
    if general is not None:
        has_other = not all(refused.values())
        with looking():
            reason = general.refuses(*op_args, **op_kwargs)
        refused[general.backend] = reason or ("a body of the device goes first" * has_other)
    if any(isinstance(mode, ReferenceMode) for mode in _get_current_dispatch_mode_stack()):
        refused = {body: why or "reference_only() is active" for body, why in refused.items()}
    chosen = next((body for body, why in refused.items() if not why), "reference")
    del refused[chosen]
    if chosen == "cpu":
        is_bfloat16 = bool(tensors) and tensors[0].dtype == torch.bfloat16
        chosen = f"cpu:{cpu_isa_of(name, is_bfloat16=is_bfloat16)}"
    return BackendChoice(op=name, chosen=chosen, refused=refused)


def _cpu_refusal(name: str, device: str) -> str:
    if device != "cpu":
        return f"inputs are on {device}"
    if has_body(name, "CPU"):
        registered = overrides.get((name, "CPU"))
        return f"{registered.backend} is registered instead" if registered else ""
    return build_info().reasons["_C"] or "mcp_kernels._C has no CPU body for this op"


def _gpu_refusal(name: str, device: str, backend: str) -> str:
    if device != "cuda":
        return f"inputs are on {device}"
    registered = overrides.get((name, "CUDA"))
    built = has_body(name, "CUDA")
    if backend == "triton":
        if registered is not None and registered.backend == "triton":
            return ""
        if built:
            return "a CUDA body is built and goes first"
        return "no Triton body is registered" if build_info().triton else "triton is not installed"
    if built and registered is None:
        return ""
    return build_info().reasons["cuda"] or "mcp_kernels._C has no CUDA body for this op"


def _op_call(
    op: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """The op that a call comes to, and the arguments it gets there."""
    if isinstance(op, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        op = str(op).split(".")[1] if str(op).startswith(f"{NAMESPACE}.") else str(op)
    if isinstance(op, str):
        name = op.removeprefix(f"{NAMESPACE}::")
        package = sys.modules[NAMESPACE]
        if name not in definitions and name in package.__all__:
            return _first_op_inside(getattr(package, name), args, kwargs)
        if name not in definitions:
            raise ValueError(
                f"which_backend: op must be one of {', '.join(sorted(definitions))}, got {op!r}"
            )
        return name, args, kwargs
    return _first_op_inside(op, args, kwargs)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace == NAMESPACE:
            self.calls.append((func._schema.name.split("::", 1)[1], args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _first_op_inside(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Run ``function`` on shapes alone and note the first op of ours that it calls."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import, seldom needed

    recorder = _Recorder()
    with FakeTensorMode(allow_non_fake_inputs=True) as fake_mode:

        def without_data(leaf: Any) -> Any:
            return fake_mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf

        fake_args, fake_kwargs = pytree.tree_map(without_data, (args, kwargs))
        with recorder:
            function(*fake_args, **fake_kwargs)
    if not recorder.calls:
        name = getattr(function, "__name__", repr(function))
        raise ValueError(f"which_backend: op must call an op of {NAMESPACE}, got {name}")
    return recorder.calls[0]
