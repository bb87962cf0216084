"""Model families: all that the trainer has to know to train one, in one record each.

A new family is a module with its stages and its record here; ``model.family`` names it. What both
the checks before the start and the trainer need (sizes, number of parameters) is in ``presets.py``,
and what it trains on is in ``data/source.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from mcp_parallel.config import ModelConfig
from mcp_parallel.model import init, vit
from mcp_parallel.model.llama import LlamaStage
from mcp_parallel.model.stage import StageModel


class BuildStage(Protocol):
    """Makes blocks ``layers`` with the first and last layers of the model where asked."""

    def __call__(
        self, config: ModelConfig, layers: range, *, has_embedding: bool, has_head: bool
    ) -> StageModel:
        """A stage on the current default device."""
        ...


Shape = Callable[[ModelConfig, int], tuple[int, ...]]
"""(model, positions of the sequence on this rank) -> shape of one sample."""


@dataclass(frozen=True)
class Family:
    """One kind of model."""

    build_stage: BuildStage
    input_shape: Shape
    """Of what the first stage is given for a sample."""
    input_dtype: torch.dtype
    output_shape: Shape
    """Of the logits of a sample, the last dim whole."""
    parameter_std: Callable[[str, ModelConfig], float | None]
    """Standard deviation of a parameter's initial values by its name; None for ones, 0 for
    zeros."""


LLAMA = Family(
    build_stage=LlamaStage,
    input_shape=lambda model, seq_len: (seq_len,),
    input_dtype=torch.int64,
    output_shape=lambda model, seq_len: (seq_len, model.vocab_size),
    parameter_std=init.parameter_std,
)


VIT = Family(
    build_stage=vit.VitStage,
    input_shape=lambda model, seq_len: (seq_len, vit.patch_values(model)),
    input_dtype=torch.float32,
    output_shape=lambda model, seq_len: (model.vocab_size,),
    parameter_std=vit.parameter_std,
)

FAMILIES = {"llama": LLAMA, "vit": VIT}


def family_of(config: ModelConfig) -> Family:
    """The family that ``config`` is a shape of."""
    return FAMILIES[config.family]


def whole_model(config: ModelConfig) -> StageModel:
    """All blocks, first and last layers in one stage."""
    build = family_of(config).build_stage
    return build(config, range(config.num_layers), has_embedding=True, has_head=True)
