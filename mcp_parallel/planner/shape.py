"""What a family of models makes of its sizes: all that the planner has to know of one. No torch.

    llama   a table's row a token, SwiGLU, causal attention with rotary positions, the head at every
            position over the vocabulary
    vit     a linear layer on each patch and a learned position, GELU, attention to all patches,
            the head once an image, at the mean over its patches; biases and two vectors a norm

Letters: h = hidden size, kv = features of the keys, f = feed-forward size, V = vocabulary or
classes, S = positions of a sample, P = values of a patch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from mcp_parallel.config import ModelConfig

_TOKEN_BYTES = 8
_PIXEL_BYTES = 4


class Held(NamedTuple):
    """Elements of some weights."""

    cut: int
    """Shared out over tensor-parallel ranks."""
    whole: int
    """On each of them."""

    def on_rank(self, tp: int) -> float:
        """Of one of ``tp`` ranks."""
        return self.cut / tp + self.whole


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One model, seen by who counts its work, its bytes and its messages."""

    up_matrices: int
    """Matrices from h to f in a block; another one leads back."""
    turns: bool
    """Queries and keys are turned by their positions, which takes a pass over them."""
    seen: float
    """Part of the positions that a position attends to, on average."""
    block_matrices: int
    """Elements of the weight matrices of a block."""
    embedding_matrix: int
    """Elements that each position is multiplied with on its way in; 0 where a row is looked up."""
    head_matrix: int
    """Elements of the output projection, tied or not."""
    head_positions: int
    """Positions of a sample that the head and the loss work on."""
    row_scales: int
    """Numbers that a norm keeps of each position."""
    block: Held
    """Weights of a block."""
    embedding: Held
    """Of the embedding."""
    head: Held
    """Of the last norm and the head, when it shares nothing with the embedding."""
    tied: int
    """Elements of ``head`` that are the embedding's where a rank has both."""
    input_bytes: int
    """Of a sample and its targets."""


@lru_cache(maxsize=64)
def shape_of(model: ModelConfig) -> Shape:
    """The shape of a model of either family, whose keys ``rules.family`` has judged or will."""
    return _vit(model) if model.family == "vit" else _llama(model)


def kv_size(model: ModelConfig) -> int:
    """Features of the keys, and of the values."""
    return model.num_kv_heads * (model.hidden_size // model.num_heads)


def _matrices(model: ModelConfig, up: int) -> int:
    hidden = model.hidden_size
    attention = 2 * hidden**2 + 2 * hidden * kv_size(model)
    return attention + (up + 1) * hidden * model.ffn_size


def _llama(model: ModelConfig) -> Shape:
    hidden, table = model.hidden_size, model.vocab_size * model.hidden_size
    matrices = _matrices(model, 2)
    return Shape(
        up_matrices=2,
        turns=True,
        seen=0.5,
        block_matrices=matrices,
        embedding_matrix=0,
        head_matrix=table,
        head_positions=model.seq_len,
        row_scales=1,
        block=Held(matrices, 2 * hidden),
        embedding=Held(table, 0),
        head=Held(table, hidden),
        tied=table if model.tie_embeddings else 0,
        input_bytes=2 * _TOKEN_BYTES * model.seq_len,
    )


def _vit(model: ModelConfig) -> Shape:
    hidden, pixels = model.hidden_size, (model.patch_size or 0) ** 2 * (model.channels or 0)
    matrices, head = _matrices(model, 1), model.vocab_size * hidden
    # Biases of queries, values and the way up are cut, those of the ways back are not; keys have
    # none (see ``model/vit.py``). A norm has a weight and a bias.
    biases = hidden + kv_size(model) + model.ffn_size
    return Shape(
        up_matrices=1,
        turns=False,
        seen=1.0,
        block_matrices=matrices,
        embedding_matrix=pixels * hidden,
        head_matrix=head,
        head_positions=1,
        row_scales=2,
        block=Held(matrices + biases, 2 * hidden + 2 * 2 * hidden),
        embedding=Held(0, (pixels + 1 + model.seq_len) * hidden),
        head=Held(head + model.vocab_size, 2 * hidden),
        tied=0,
        input_bytes=_PIXEL_BYTES * pixels * model.seq_len + _TOKEN_BYTES,
    )
