"""Every field that monitors write: into ``metrics.jsonl`` a line a step, into ``verdicts.jsonl``.

A reader of a run folder needs nothing but this table. A field is in a record where it was measured,
and not there otherwise; a number that is not finite is null. Kinds of values:

    number  one figure
    ranks   a list, a figure for each rank, in the order of global ranks
    layers  an object, layer name -> figure, in the order of the model: ``embed`` (``patches``),
            ``blocks.0`` ..., ``norm``, ``head``; a tied head counts as ``embed``

TensorBoard has the same: ``train/<field>`` for a number, ``<field>/<layer>``, ``<field>/min``,
``median`` and ``max`` over ranks, and verdicts as texts. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["number", "ranks", "layers"]
When = Literal["every", "sampled"]


@dataclass(frozen=True, slots=True)
class Field:
    """One figure of a record."""

    kind: Kind
    unit: str
    """Empty for a ratio or a plain number."""
    when: When
    """every: each record; sampled: those of steps that ``monitor.health_every`` divides."""
    doc: str


FIELDS: dict[str, Field] = {
    # What a step did.
    "loss": Field("number", "nats", "every", "mean over the valid tokens of the global batch"),
    "loss_z": Field(
        "number", "", "every", "robust z-score of the loss against the steps before; from step 17"
    ),
    "lr": Field("number", "", "every", "learning rate of the update"),
    "grad_norm": Field("number", "", "every", "global gradient norm before clipping"),
    "grad_norm_clipped": Field("number", "", "every", "the same after clipping"),
    "clipped_share": Field(
        "number", "", "every", "share of the last 50 steps whose gradient was clipped, 0 to 1"
    ),
    # Speed.
    "tokens_per_s": Field("number", "tokens/s", "every", "over all ranks"),
    "step_time_s": Field("number", "s", "every", "mean over the steps since the record before"),
    "model_tflops_per_rank": Field(
        "number", "TFLOP/s", "every", "of the model's own products, attention included, a rank"
    ),
    "mfu": Field("number", "", "every", "that over the hardware's peak, 0 to 1"),
    "communication_share": Field(
        "number", "", "every", "part of the step in which rank 0 moves or awaits bytes; on CPUs"
    ),
    "bubble": Field("number", "", "every", "idle part of a pipeline, mean over its ranks"),
    "compute_s_by_rank": Field(
        "ranks",
        "s",
        "every",
        "time of the step that each rank spent on its own work; on CPUs; sampled above 64 ranks",
    ),
    "data_wait_share": Field(
        "number", "", "every", "part of the step in which rank 0 waited for its batch, 0 to 1"
    ),
    # Health, sampled.
    "grad_norm_by_layer": Field("layers", "", "sampled", "before clipping"),
    "grad_norm_per_million_by_layer": Field(
        "layers", "", "sampled", "a layer's norm / sqrt(its parameters / 1e6): of equal sizes"
    ),
    "weight_norm_by_layer": Field("layers", "", "sampled", "before the update"),
    "update_ratio_by_layer": Field("layers", "", "sampled", "||change of W|| / ||W||"),
    "activation_mean_by_layer": Field(
        "layers", "", "sampled", "of a block's output, over the global batch"
    ),
    "activation_variance_by_layer": Field("layers", "", "sampled", "of the same"),
    "variance_growth": Field("number", "", "sampled", "last block's variance over the first one's"),
    "dead_share_by_layer": Field(
        "layers", "", "sampled", "share of feed-forward units that no token of the batch woke"
    ),
    # Memory, sampled.
    "memory_bytes_by_rank": Field(
        "ranks", "bytes", "sampled", "peak: resident set on a CPU, allocated on a GPU"
    ),
    "step_memory_bytes_by_rank": Field(
        "ranks",
        "bytes",
        "sampled",
        "most that one step allocated beyond what stays; in the first sample alone, on CPUs with "
        "monitor.step_memory",
    ),
}


@dataclass(frozen=True, slots=True)
class VerdictKind:
    """What a line of ``verdicts.jsonl`` may say."""

    severity: Literal["warning", "error"]
    title: str


VERDICTS: dict[str, VerdictKind] = {
    "loss_spike": VerdictKind("warning", "the loss jumped"),
    "gradient_explodes": VerdictKind("warning", "the gradient norm left its range"),
    "gradient_vanishes": VerdictKind("warning", "a layer gets next to no gradient"),
    "always_clipped": VerdictKind("warning", "clipping decides the size of every update"),
    "update_too_large": VerdictKind("warning", "updates are large beside the weights"),
    "update_too_small": VerdictKind("warning", "a layer stands still"),
    "variance_grows": VerdictKind("warning", "activations grow with depth"),
    "variance_collapses": VerdictKind("warning", "activations vanish with depth"),
    "dead_units": VerdictKind("warning", "feed-forward units no longer react"),
    "not_finite": VerdictKind("error", "a module made a NaN or an infinity"),
    "straggler": VerdictKind("warning", "one rank is slower than its peers"),
    "loss_scale_falls": VerdictKind("warning", "steps are skipped again and again"),
}

VERDICT_KEYS: dict[str, str] = {
    "step": "steps done, as in metrics.jsonl",
    "kind": "a key of VERDICTS",
    "severity": "warning or error",
    "where": "layer, module or rank; null where it is the run as a whole",
    "host": "host of that rank, else null",
    "value": "what was measured; null where it is no number",
    "low": "least healthy value, or null",
    "high": "largest healthy value, or null",
    "text": "the whole verdict in one line: what, likely cause, what to change",
    "cause": "likely cause",
    "advice": "what to change",
}
"""Keys of each line of ``verdicts.jsonl``; a condition is told again only after it was gone."""
