"""Rules of a single key: its range, and what is not in this version yet. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import reduce
from typing import Any, NamedTuple

from mcp_parallel.config import TABLES, Config
from mcp_parallel.config_schema import all_tables
from mcp_parallel.errors import joined, shown
from mcp_parallel.presets import PRESETS
from mcp_parallel.rules.problem import Problem


class Bound(NamedTuple):
    """An interval, closed but where ``above`` says that ``low`` itself is out."""

    low: float
    high: float
    above: bool = False


# Upper bounds are far above any model or machine: they turn a slip of the keyboard into a message
# instead of a hang or an allocation that cannot succeed.
_DEGREE = Bound(1, 1 << 20)
_STEPS = Bound(1, 10**9)
_SEED = Bound(0, (1 << 63) - 1)  # torch and numpy take seeds below 2**63

BOUNDS: dict[str, Bound] = {
    "model.num_layers": Bound(1, 10_000),
    "model.hidden_size": Bound(2, 1 << 20),
    "model.num_heads": Bound(1, 1 << 16),
    "model.num_kv_heads": Bound(1, 1 << 16),
    "model.ffn_size": Bound(1, 1 << 24),
    "model.vocab_size": Bound(2, 1 << 24),
    "model.seq_len": Bound(1, 1 << 24),
    "model.rope_theta": Bound(1.0, 1e12),
    "model.norm_eps": Bound(0.0, 1.0),
    "model.residual_init_scale": Bound(0.0, 1e3),
    "model.image_size": Bound(1, 1 << 14),
    "model.patch_size": Bound(1, 1 << 14),
    "model.channels": Bound(1, 1 << 10),
    "model.num_classes": Bound(2, 1 << 24),
    "parallel.dp": _DEGREE,
    "parallel.tp": _DEGREE,
    "parallel.pp": _DEGREE,
    "parallel.cp": _DEGREE,
    "parallel.zero": Bound(0, 3),
    "parallel.dp_replicate": _DEGREE,
    "parallel.virtual_stages": Bound(1, 10_000),
    "parallel.ranks": _DEGREE,
    "parallel.link_domain": Bound(0, 1 << 20),
    "train.steps": _STEPS,
    "train.seed": _SEED,
    "train.global_batch_size": Bound(1, 1 << 24),
    "train.micro_batch_size": Bound(1, 1 << 24),
    "train.lr": Bound(0.0, 1e3, above=True),
    "train.min_lr": Bound(0.0, 1e3),
    "train.warmup_steps": Bound(0, 10**9),
    "train.weight_decay": Bound(0.0, 1e3),
    "train.clip_norm": Bound(0.0, 1e30),
    "train.freeze_step": Bound(0, 10**9),
    "train.fp32_embedding_steps": Bound(0, 10**9),
    "train.fp32_embedding_switch_steps": Bound(0, 10**9),
    # The scaled loss is float32, which ends at 3e38.
    "amp.grad_scaler.init_scale": Bound(1.0, 1e30),
    "amp.grad_scaler.growth_interval": _STEPS,
    "data.seed": _SEED,
    "data.document_separator": Bound(0, (1 << 24) - 1),
    "data.validation_share": Bound(0.0, 0.5),
    "checkpoint.every": Bound(0, 10**9),
    "checkpoint.keep": Bound(1, 10**6),
    "checkpoint.replicas": Bound(1, 100),
    "monitor.every": _STEPS,
    "monitor.validate_every": Bound(0, 10**9),
    "monitor.validate_batches": _STEPS,
    "monitor.health_every": Bound(0, 10**9),
    # Below 1 the median itself would be a straggler.
    "monitor.straggler_factor": Bound(1.0, 1e6, above=True),
    "monitor.straggler_steps": Bound(3, 10_000),
    "monitor.peak_tflops": Bound(0.0, 1e9, above=True),
}

# Keys whose other values the configuration already knows and this version does not run.
_HERE: dict[str, tuple[Any, ...]] = {
    "checkpoint.replicas": (1,),
    "checkpoint.async": (False,),
}


def value_of(config: Config, key: str) -> Any:
    """The value at ``table.key``, with the key spelled as in a file."""
    names = ("async_" if name == "async" else name for name in key.split("."))
    return reduce(getattr, names, config)


def default_of(key: str) -> Any:
    """The default of ``table.key``."""
    table, _, name = key.rpartition(".")
    known = fields(all_tables(TABLES)[table])
    return next(f.default for f in known if f.name == name and f.default is not MISSING)


def range_problems(config: Config) -> Iterator[Problem]:
    """Every number outside its range; NaN is outside of all."""
    for key, bound in BOUNDS.items():
        value = value_of(config, key)
        if value is None or _inside(value, bound):
            continue
        clamped = bound.high if value > bound.high else bound.low
        default = default_of(key)
        choices = [default] if bound.above or math.isnan(value) else [clamped]
        if default not in (None, *choices) and _inside(default, bound):
            choices.append(default)
        low = f"above {bound.low:g}" if bound.above else f"at least {bound.low:g}"
        rule = f"be {low} and at most {_number(bound.high)}"
        yield Problem(
            f"range {key}", key, rule, shown(value), tuple({key: choice} for choice in choices)
        )


def _inside(value: float, bound: Bound) -> bool:
    return bound.low <= value <= bound.high and not (bound.above and value == bound.low)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def not_yet_problems(config: Config) -> Iterator[Problem]:
    """Every choice that is part of the configuration but not of this version."""
    for key, here in _HERE.items():
        value = value_of(config, key)
        if value not in here and not (key in BOUNDS and value < here[0]):
            rule = f"be {joined(_word(choice) for choice in here)} in this version"
            ways = tuple({key: choice} for choice in here)
            yield Problem(f"not yet {key}", key, rule, _word(value), ways)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else shown(value)


def relation_problems(config: Config) -> Iterator[Problem]:
    """Pairs of keys of the training table, and a preset that was never filled in."""
    train, model = config.train, config.model
    if train.min_lr > train.lr > 0:
        yield Problem(
            "min_lr",
            "train.min_lr",
            f"be at most train.lr = {train.lr!r}",
            repr(train.min_lr),
            ({"train.min_lr": train.lr / 10}, {"train.min_lr": train.lr}),
        )
    if 0 < train.steps < train.warmup_steps:
        yield Problem(
            "warmup_steps",
            "train.warmup_steps",
            f"be at most train.steps = {shown(train.steps)}",
            shown(train.warmup_steps),
            ({"train.warmup_steps": train.steps // 10}, {"train.warmup_steps": train.steps}),
        )
    if config.parallel.ranks is not None and not config.parallel.auto:
        yield Problem(
            "ranks without auto",
            "parallel.ranks",
            "be null without parallel.auto (the degrees say how many ranks there are)",
            shown(config.parallel.ranks),
            ({"parallel.ranks": None}, {"parallel.auto": True}),
        )
    if train.freeze_step is not None and train.optimizer != "onebit_adam":
        yield Problem(
            "freeze_step",
            "train.freeze_step",
            f"be null with optimizer {train.optimizer}",
            shown(train.freeze_step),
            ({"train.freeze_step": None},),
        )
    if model.preset in PRESETS and model.preset != "tiny" and _has_shape_of(config, "tiny"):
        yield Problem(
            "preset",
            "model.preset",
            "be filled in (Config.from_mapping does it, the constructor does not)",
            f"{model.preset} with the sizes of tiny",
            ({"model.preset": "tiny"}, {"model.preset": None}),
        )


def _has_shape_of(config: Config, preset: str) -> bool:
    return all(getattr(config.model, key) == value for key, value in PRESETS[preset].items())
