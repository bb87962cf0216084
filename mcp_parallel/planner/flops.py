"""Work of a model in floating-point operations, from its shape. No torch.

A multiply-add counts as two. A forward pass multiplies each token with every weight matrix, and a
backward pass does it twice (gradients of inputs and of weights), so 6 a weight and token. Attention
multiplies a token with the keys and values that it sees: all S in the older convention, S / 2 on
average where only what is causal counts. Computing something again is not model work.
"""

from __future__ import annotations

from mcp_parallel.config import ModelConfig


def kv_size(model: ModelConfig) -> int:
    """Features of the keys, and of the values."""
    return model.num_kv_heads * (model.hidden_size // model.num_heads)


def block_matrices(model: ModelConfig) -> int:
    """Elements of the weight matrices of one block."""
    hidden = model.hidden_size
    return 2 * hidden**2 + 2 * hidden * kv_size(model) + 3 * hidden * model.ffn_size


def head_matrix(model: ModelConfig) -> int:
    """Elements of the output projection, tied or not."""
    return model.hidden_size * model.vocab_size


def attention_flops(model: ModelConfig, *, causal: bool = True) -> float:
    """Of one block's two attention products, for one token's forward pass."""
    seen = model.seq_len / 2 if causal else model.seq_len
    return 4 * seen * model.hidden_size


def flops_per_token(model: ModelConfig, *, causal: bool = True) -> float:
    """Model work of one training token, forward and backward.

    Args:
        model: of the Llama family.
        causal: count half of the attention matrix; False counts all of it, as Megatron-LM's older
            tables do.
    """
    matrices = model.num_layers * block_matrices(model) + head_matrix(model)
    attention = model.num_layers * attention_flops(model, causal=causal)
    return 6 * matrices + 3 * attention
