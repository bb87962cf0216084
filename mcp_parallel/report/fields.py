"""Names, units and places of the fields that are known; others go by their own. No torch.

What a field means is said where it is written, in ``mcp_parallel.monitor.fields``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from mcp_parallel.monitor.fields import FIELDS

Format = Literal["number", "share", "bytes", "seconds", "rate"]
GROUPS = ("Training", "Speed", "Overheads", "Health", "Memory", "More")


class Shown(NamedTuple):
    """How the page shows one field."""

    title: str
    group: str
    format: Format = "number"
    """share: 0 to 1, as per cent; rate: with k, M, G; bytes and seconds with their units."""
    log: bool = False
    """The chart starts with a logarithmic axis."""
    over: str | None = None
    """Drawn dashed in the chart of this other field, where that is there."""
    doc: str = ""


_TRAINING, _SPEED, _OVERHEADS, _HEALTH, _MEMORY, _MORE = GROUPS

# In the order of the page.
KNOWN: dict[str, Shown] = {
    "loss": Shown("Loss", _TRAINING),
    "val_loss": Shown("Validation loss", _TRAINING, over="loss", doc="on data not trained on"),
    "val_accuracy": Shown(
        "Validation accuracy", _TRAINING, "share", doc="share of right answers on that data"
    ),
    "grad_norm": Shown("Gradient norm", _TRAINING),
    "grad_norm_clipped": Shown("Gradient norm, clipped", _TRAINING, over="grad_norm"),
    "clipped_share": Shown("Steps clipped", _TRAINING, "share"),
    "lr": Shown("Learning rate", _TRAINING),
    "loss_z": Shown("Loss, robust z-score", _TRAINING),
    "loss_scale": Shown("Loss scale", _TRAINING, log=True, doc="factor of an fp16 loss"),
    "skipped": Shown("Skipped steps", _TRAINING, "share", doc="1 where gradients overflowed"),
    "tokens_per_s": Shown("Throughput", _SPEED, "rate"),
    "step_time_s": Shown("Step time", _SPEED, "seconds"),
    "mfu": Shown(
        "Model FLOPs utilization", _SPEED, "share", doc="FLOPs of the model, over the peak"
    ),
    "model_tflops_per_rank": Shown(
        "TFLOP/s of a rank", _SPEED, doc="of the model's own products, attention included"
    ),
    "data_wait_share": Shown("Waiting for data", _SPEED, "share"),
    "bubble": Shown("Pipeline bubble", _OVERHEADS, "share"),
    "bubble_by_rank": Shown(
        "Bubble by pipeline rank", _OVERHEADS, "share", doc="idle part of each pipeline rank"
    ),
    "communication_share": Shown("Communication share", _OVERHEADS, "share"),
    "wire_bytes": Shown("Bytes sent by rank 0", _OVERHEADS, "bytes", doc="over dp, in a step"),
    "compression_ratio": Shown(
        "Compression", _OVERHEADS, doc="bytes that float32 takes, over those sent"
    ),
    "compute_s_by_rank": Shown("Own work by rank", _OVERHEADS, "seconds"),
    "variance_growth": Shown("Variance growth by depth", _HEALTH, log=True),
    "update_ratio_by_layer": Shown("Update ratio by layer", _HEALTH, log=True),
    "grad_norm_by_layer": Shown("Gradient norm by layer", _HEALTH, log=True),
    "grad_norm_per_million_by_layer": Shown(
        "Gradient norm by layer, of a million parameters", _HEALTH, log=True
    ),
    "weight_norm_by_layer": Shown("Weight norm by layer", _HEALTH, log=True),
    "activation_mean_by_layer": Shown("Activation mean by layer", _HEALTH),
    "activation_variance_by_layer": Shown(
        "Activation variance by layer", _HEALTH, log=True, doc="of a block's output"
    ),
    "dead_share_by_layer": Shown("Dead units by layer", _HEALTH, "share"),
    "memory_bytes_by_rank": Shown("Peak memory by rank", _MEMORY, "bytes"),
    "step_memory_bytes_by_rank": Shown("Memory of a step by rank", _MEMORY, "bytes"),
}

_ENDINGS: dict[str, Format] = {
    "_per_s": "rate",
    "_bytes": "bytes",
    "_share": "share",
    "_s": "seconds",
}


def shown_fields(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What the page must know of each of ``names``, in its order: known ones, then by name."""
    names = set(names)
    order = [name for name in KNOWN if name in names] + sorted(names - KNOWN.keys())
    return {name: _shown(name)._asdict() for name in order}


def _shown(name: str) -> Shown:
    shown = KNOWN.get(name) or Shown(name, _MORE, _format_of(name))
    field = FIELDS.get(name)
    return shown if field is None or shown.doc else shown._replace(doc=field.doc)


def _format_of(name: str) -> Format:
    base = name.removesuffix("_by_rank").removesuffix("_by_layer")
    for ending, kind in _ENDINGS.items():
        if base.endswith(ending):
            return kind
    return "number"
