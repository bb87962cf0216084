"""Work of a model in floating-point operations, from its shape. No torch.

A multiply-add counts as two. A forward pass multiplies each token with every weight matrix, and a
backward pass does it twice (gradients of inputs and of weights), so 6 a weight and token. Attention
multiplies a token with the keys and values that it sees: all S in the older convention and between
patches, S / 2 on average where only what is causal counts. Computing something again is not model
work.
"""

from __future__ import annotations

from mcp_parallel.config import ModelConfig
from mcp_parallel.planner.shape import shape_of


def block_matrices(model: ModelConfig) -> int:
    """Elements of the weight matrices of one block."""
    return shape_of(model).block_matrices


def head_matrix(model: ModelConfig) -> int:
    """Elements of the output projection, tied or not."""
    return shape_of(model).head_matrix


def attention_flops(model: ModelConfig, *, causal: bool = True) -> float:
    """Of one block's two attention products, for one token's forward pass.

    ``causal`` counts what a causal model's mask leaves; False counts all of it in any model.
    """
    seen = shape_of(model).seen if causal else 1.0
    return 4 * seen * model.seq_len * model.hidden_size


def flops_per_token(model: ModelConfig, *, causal: bool = True) -> float:
    """Model work of one training token, forward and backward.

    Args:
        model: of either family; a token is a patch of images, whose head works once an image.
        causal: count half of a causal model's attention matrix; False counts all of it, as
            Megatron-LM's older tables do.
    """
    shape = shape_of(model)
    head = shape.head_matrix * shape.head_positions / model.seq_len
    matrices = model.num_layers * shape.block_matrices + shape.embedding_matrix + head
    attention = model.num_layers * attention_flops(model, causal=causal)
    return 6 * matrices + 3 * attention
