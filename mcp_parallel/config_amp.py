"""The ``amp`` table, and what it makes of ``train.precision``. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mcp_parallel.errors import shown

Precision = Literal["fp64", "fp32", "bf16", "fp16"]
DEFAULT_PRECISION: Precision = "fp32"


@dataclass(frozen=True, kw_only=True, slots=True)
class GradScalerConfig:
    """Dynamic loss scaling: the loss is multiplied so that small gradients do not vanish in fp16.

    A step whose gradients overflow is skipped and halves the scale; growth_interval steps in a row
    without one double it.
    """

    enabled: bool | None = None
    """Whether to scale; null scales under fp16 alone."""
    init_scale: float = 65536.0
    """Scale of the first step, at least 1, below which a run has diverged."""
    growth_interval: int = 2000
    """Steps without overflow before the scale is doubled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AmpConfig:
    """Mixed precision as other trainers spell it; with enabled it says what train.precision is."""

    enabled: bool = False
    """Whether train.precision is amp.dtype; false leaves it as given, fp32 if not."""
    dtype: Literal["bf16", "fp16"] = "bf16"
    """The number format; no effect unless enabled."""
    grad_scaler: GradScalerConfig = field(default_factory=GradScalerConfig)
    """Loss scaling, whether train.precision or amp set the format."""


def with_amp(
    train: Mapping[str, Any], amp: Mapping[str, Any], problems: list[str]
) -> Mapping[str, Any]:
    """The training table with the precision that ``amp`` asks for."""
    dtype = amp.get("dtype", "bf16")
    if amp.get("enabled") is not True or dtype not in ("bf16", "fp16"):
        return train  # off, or a wrong type, which is told elsewhere
    given = train.get("precision", dtype)
    if given != dtype:
        use = f"train.precision = {dtype}, amp.enabled = false"
        use += f", or amp.dtype = {given}" if given in ("bf16", "fp16") else ""
        problems.append(
            f"config: train.precision must be {dtype} as amp.dtype with amp.enabled = true, got "
            f"{shown(given)}; use {use}"
        )
    return {**train, "precision": dtype}


def forget_precision(values: dict[str, Any]) -> None:
    """Drop a precision that ``amp`` set or that is the default; changes of ``amp`` decide anew."""
    if values["amp"]["enabled"] or values["train"]["precision"] == DEFAULT_PRECISION:
        del values["train"]["precision"]
