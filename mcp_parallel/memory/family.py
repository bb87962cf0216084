"""What is replayed of each model family, in one record each. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mcp_parallel.config import ModelConfig
from mcp_parallel.memory import images
from mcp_parallel.memory.block import BlockPass, GiveGradient
from mcp_parallel.memory.ends import (
    HeadPass,
    embedding_backward,
    embedding_forward,
    text_ends,
)
from mcp_parallel.memory.ledger import Ledger, Memory
from mcp_parallel.memory.sizes import Sizes

_NUMBER = 8
"""Bytes of a token, a target or a class."""
_PIXEL = 4


class Ends(Protocol):
    """Elements of the weights of a stage that are in no block, by name."""

    def __call__(
        self, s: Sizes, *, has_embedding: bool, has_head: bool, is_tied: bool
    ) -> dict[str, int]:
        """Those of a rank."""
        ...


@dataclass(frozen=True)
class Replayed:
    """One family, as allocations."""

    block: type[BlockPass]
    head: type[HeadPass] | type[images.ImageHeadPass]
    embedding_forward: Callable[[Ledger, Sizes], Memory]
    embedding_backward: Callable[[Ledger, Sizes, Memory, GiveGradient], None]
    ends: Ends
    sample_bytes: Callable[[Sizes], int]
    """Of a sample and its targets, whole."""
    table_bytes: Callable[[Sizes], int]
    """Of what is made once for all steps."""


def _rotary_bytes(s: Sizes) -> int:
    """Cosines and sines of every position, as ``model/rotary.py`` caches them."""
    return 2 * s.seq_len * max(4, s.compute_bytes) * s.head_size // 2


_REPLAYED = {
    "llama": Replayed(
        block=BlockPass,
        head=HeadPass,
        embedding_forward=embedding_forward,
        embedding_backward=embedding_backward,
        ends=text_ends,
        sample_bytes=lambda s: 2 * _NUMBER * s.seq_len,
        table_bytes=_rotary_bytes,
    ),
    "vit": Replayed(
        block=images.ImageBlockPass,
        head=images.ImageHeadPass,
        embedding_forward=images.patches_forward,
        embedding_backward=images.patches_backward,
        ends=images.image_ends,
        sample_bytes=lambda s: _NUMBER + _PIXEL * s.seq_len * s.patch_values,
        table_bytes=lambda s: 0,
    ),
}


def replayed_of(model: ModelConfig) -> Replayed:
    """The record of the family that ``model`` is a shape of."""
    return _REPLAYED[model.family]
