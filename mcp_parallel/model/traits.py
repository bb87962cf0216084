"""What commands and records have to know of a model's family. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from mcp_parallel.config import ModelConfig


@dataclass(frozen=True)
class Traits:
    """One family, seen from outside of the trainer."""

    unit: str
    """What has one target: losses are means over these, speeds count them."""
    position: str
    """What a sample's positions are."""
    data_is_named: bool
    """``data.path`` is a name and no place on disk."""
    continues_text: bool
    """A trained model can go on with a text."""


_TRAITS = {
    "llama": Traits(unit="tokens", position="tokens", data_is_named=False, continues_text=True),
    "vit": Traits(unit="images", position="patches", data_is_named=True, continues_text=False),
}


def traits_of(config: ModelConfig) -> Traits:
    """The traits of the family that ``config`` is a shape of."""
    return _TRAITS[config.family]
