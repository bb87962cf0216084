"""The first module that made a NaN or an infinity, by one more pass over the same batch.

A step that is not finite is not applied, so weights and batch are what they were: weights are
looked at first, and where they are sound the batch runs forward and backward once more with hooks
on every module. Each rank keeps its first event; the earliest of all ranks is the culprit.

What a module is given by another one is looked at as well as what it gives: an operation between
two modules (softmax, an activation function, a residual sum) is told by the one that is given its
result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mcp_parallel.monitor.texts import gather_texts
from mcp_parallel.monitor.verdicts import Finding
from mcp_parallel.parallel.shards import Shard

if TYPE_CHECKING:
    from mcp_parallel.parallel.parallelize import Stage
    from mcp_parallel.step import TrainingStep

Phase = Literal["weights", "data", "forward", "loss", "backward"]
_ORDER: tuple[Phase, ...] = ("weights", "data", "forward", "loss", "backward")


@dataclass(frozen=True)
class Culprit:
    """Where the first value that is not finite came from."""

    phase: Phase
    module: str
    """Parameter, module or loss."""
    side: str
    """The tensor it was seen in, in words."""
    value: str
    """NaN or infinity."""
    rank: int

    def finding(self) -> Finding:
        """The verdict."""
        cause, advice = _ADVICE[self.phase]
        return Finding(
            kind="not_finite",
            what=f"{self.value} in the {self.side} of {self.module}, first seen on rank "
            f"{self.rank} in {_PHASES[self.phase]}",
            cause=cause,
            advice=advice,
            where=self.module,
        )


# The square of a float32 from here on is next to infinity or beyond.
_SQUARE_OVERFLOWS = 1e18

_PHASES: dict[Phase, str] = {
    "weights": "the weights, before the step",
    "data": "the data",
    "forward": "the forward pass",
    "loss": "the loss",
    "backward": "the backward pass",
}
_ADVICE: dict[Phase, tuple[str, str]] = {
    "weights": (
        "a checkpoint that was damaged or edited, or memory that flipped bits",
        "go on from an older checkpoint; if it comes back, test that rank's memory",
    ),
    "data": ("samples that hold such values", "look at this step's samples"),
    "forward": (
        "activations that outgrew the number format, or a division by zero there",
        "look at activation_variance before it; lower train.lr, or use bf16 or fp32",
    ),
    "loss": (
        "logits that are too far apart for the number format",
        "lower train.lr, or use train.precision=fp32",
    ),
    "backward": (
        "gradients that outgrew the number format, or a derivative without a value there",
        "lower train.lr, or use train.precision=bf16 or fp32",
    ),
}


def find_culprit(
    step: TrainingStep,
    inputs: Tensor,
    targets: Tensor,
    *,
    documents: Tensor | None = None,
    done: int = 0,
) -> Culprit | None:
    """The first module that made a value that is not finite; collective over the mesh.

    Args:
        step: the model, as it was before the step that was not finite.
        inputs: of that step, as it was given them.
        targets: likewise.
        documents: likewise.
        done: steps done before it.

    Returns:
        The same on every rank; None where the batch gives finite values this time, which points
        at hardware.

    Cost: one step without an update; its gradients are dropped.
    """
    found = _in_weights(step.shards) or _in_data(inputs)
    known = _earliest(found, step)
    if known is not None:
        return known
    with _watched(step.stages) as events:
        loss = step.accumulate(inputs, targets, documents=documents, step=done)
    own = events.first
    if (own is None or own.phase == "backward") and not _is_finite(loss):
        own = _Event("loss", "the loss", "value", _kind(loss), (0, 0))
    return _earliest(own or _beyond_a_norm(step.shards), step)


def explain(
    step: TrainingStep, inputs: Tensor, targets: Tensor, documents: Tensor | None, *, done: int
) -> Finding:
    """The verdict on a step that was not finite; see ``find_culprit``."""
    culprit = find_culprit(step, inputs, targets, documents=documents, done=done)
    if culprit is not None:
        return culprit.finding()
    return Finding(
        kind="not_finite",
        what="the step was not finite, and a second pass over the same batch is",
        cause="a loss scale that was too high, or a rank whose hardware computes wrongly",
        advice="resume from the last good checkpoint; if it comes back, test the ranks' hardware",
    )


@dataclass(frozen=True)
class _Event:
    phase: Phase
    module: str
    side: str
    value: str
    place: tuple[int, int]
    """Stage and module in the order of this phase: what tells ranks' events apart."""


def _earliest(own: _Event | None, step: TrainingStep) -> Culprit | None:
    """The first of all ranks' events."""
    text = ""
    if own is not None:
        fields = [_ORDER.index(own.phase), *own.place, own.module, own.side, own.value]
        text = json.dumps(fields, separators=(",", ":"))
    texts = gather_texts(text, step.mesh)
    events = [(*json.loads(one), rank) for rank, one in enumerate(texts) if one]
    if not events:
        return None
    phase, _, _, module, side, value, rank = min(events, key=lambda e: (*e[:3], e[-1]))
    return Culprit(_ORDER[phase], module, side, value, rank)


def _kind(tensor: Tensor) -> str:
    return "NaN" if bool(torch.isnan(tensor).any()) else "infinity"


def _is_finite(tensor: Tensor) -> bool:
    # A sum of finite values in float64 is finite, and takes one pass without a mask.
    return math.isfinite(tensor.detach().sum(dtype=torch.float64).item())


def _in_weights(shards: Sequence[Shard]) -> _Event | None:
    for index, shard in enumerate(shards):
        if not _is_finite(shard.local):
            place = (0, index)
            return _Event("weights", shard.name, "weights", _kind(shard.local), place)
    return None


def _in_data(inputs: Tensor) -> _Event | None:
    if not inputs.is_floating_point() or _is_finite(inputs):
        return None
    return _Event("data", "the batch", "values", _kind(inputs), (0, 0))


def _beyond_a_norm(shards: Sequence[Shard]) -> _Event | None:
    """The largest gradient, where its square is infinite though it is not."""
    worst, name = 0.0, ""
    for shard in shards:
        grad = shard.local_grad
        if grad is not None and grad.numel():
            largest = grad.abs().max().item()
            worst, name = max((worst, name), (largest, shard.name))
    if worst < _SQUARE_OVERFLOWS:
        return None
    return _Event("backward", name, "gradient's norm", "infinity", (0, 0))


class _Events:
    """The first event of this rank."""

    def __init__(self) -> None:
        self.first: _Event | None = None

    def see(self, value: Any, phase: Phase, module: str, side: str, place: tuple[int, int]) -> None:
        """Look at ``value`` unless something was found already."""
        if self.first is not None or not isinstance(value, Tensor):
            return
        if value.is_floating_point() and value.numel() and not _is_finite(value):
            self.first = _Event(phase, module, side, _kind(value), place)


@contextmanager
def _watched(stages: Sequence[Stage]) -> Iterator[_Events]:
    """Hooks on every module of this rank, on what goes in and out of it, forward and backward."""
    events, handles = _Events(), list[RemovableHandle]()
    try:
        for stage in stages:
            named = [(n, m) for n, m in stage.model.named_modules() if n and _computes(m)]
            for index, (name, module) in enumerate(named):
                places = (stage.index, index), (-stage.index, -index)
                handles += _hooks_on(module, name, places, events)
        yield events
    finally:
        for handle in handles:
            handle.remove()


def _computes(module: nn.Module) -> bool:
    return not isinstance(module, (nn.ModuleDict, nn.ModuleList))


def _hooks_on(
    module: nn.Module,
    name: str,
    places: tuple[tuple[int, int], tuple[int, int]],
    events: _Events,
) -> list[RemovableHandle]:
    forward_place, backward_place = places

    def look(value: Any, side: str) -> Any:
        if torch._C._current_graph_task_id() != -1:
            return value  # a block that checkpointing runs again has been seen
        events.see(value, "forward", name, side, forward_place)
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        # Of a tensor that several modules take, each gets a name of its own: the gradient that
        # comes to it is this module's alone.
        own = value.view_as(value) if side == "input" else value
        own.register_hook(
            lambda grad: events.see(
                grad, "backward", name, f"gradient of the {side}", backward_place
            )
        )
        return own

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(look(value, "input") for value in args)

    def after(_: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        for value in out if isinstance(out, (tuple, list)) else (out,):
            look(value, "output")

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
