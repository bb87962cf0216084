"""Layers as monitors name them: what a figure "by layer" is a figure of."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mcp_parallel.config import ModelConfig
from mcp_parallel.parallel.parallelize import global_shapes


def layer_of(parameter: str) -> str:
    """``blocks.3`` of ``blocks.3.attn.wq``; else the first part of the name."""
    first, *rest = parameter.split(".")
    return f"{first}.{rest[0]}" if first == "blocks" else first


@dataclass(frozen=True)
class Layers:
    """The layers of a whole model, the same on every rank."""

    names: tuple[str, ...]
    """In the order of the model."""
    num_parameters: tuple[int, ...]

    @classmethod
    def of(cls, model: ModelConfig) -> Layers:
        """The layers of a model, whatever part of it is on this rank."""
        sizes: dict[str, int] = {}
        for name, shape in global_shapes(model).items():
            layer = layer_of(name)
            sizes[layer] = sizes.get(layer, 0) + math.prod(shape)
        return cls(tuple(sizes), tuple(sizes.values()))

    def index(self, parameter: str) -> int:
        """Place of the layer that a parameter belongs to."""
        return self.names.index(layer_of(parameter))

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of blocks alone."""
        return tuple(name for name in self.names if name.startswith("blocks."))
