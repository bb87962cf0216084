"""Published model shapes by name, and how many parameters a shape has. No torch.

GPT-3 (Brown et al. 2020, table 2.1) has LayerNorm, GELU and learned positions; its rows keep
layers, width, heads, vocabulary, context and tied embeddings, and take the SwiGLU width that costs
what its 4 * hidden_size GELU layer cost: 8/3 * hidden_size, rounded up to a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcp_parallel.config import ModelConfig

_SIZE_KEYS = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "ffn_size",
    "vocab_size",
    "seq_len",
)


def _shape(*sizes: int, tied: bool = False, theta: float = 10000.0) -> dict[str, int | float]:
    shape: dict[str, int | float] = dict(zip(_SIZE_KEYS, sizes, strict=True))
    return {**shape, "tie_embeddings": tied, "rope_theta": theta, "norm_eps": 1e-5}


# layers, hidden, heads, kv heads, ffn, vocabulary, context
PRESETS: Mapping[str, Mapping[str, int | float]] = {
    # Ours: bytes as tokens, trains visibly on two CPU cores in a minute.
    "tiny": _shape(4, 128, 8, 4, 352, 256, 128),
    # GPT-3 Small, Medium and XL. XL is published with 24 heads of 128, which is not its width of
    # 2048; 16 heads of 128 are.
    "125m": _shape(12, 768, 12, 12, 2048, 50257, 2048, tied=True),
    "350m": _shape(24, 1024, 16, 16, 2736, 50257, 2048, tied=True),
    "1.3b": _shape(24, 2048, 16, 16, 5472, 50257, 2048, tied=True),
    # Llama 2 (Touvron et al. 2023).
    "7b": _shape(32, 4096, 32, 32, 11008, 32000, 4096),
    "13b": _shape(40, 5120, 40, 40, 13824, 32000, 4096),
    # Code Llama 34B (Roziere et al. 2023), trained at 16384 tokens with a RoPE base of 1e6.
    "34b": _shape(48, 8192, 64, 8, 22016, 32000, 16384, theta=1e6),
    # Llama 3 70B and Llama 3.1 405B (Llama team 2024, table 3), at their pre-training context.
    "70b": _shape(80, 8192, 64, 8, 28672, 128256, 8192, theta=5e5),
    # GPT-3 175B.
    "175b": _shape(96, 12288, 96, 96, 32768, 50257, 2048, tied=True),
    "405b": _shape(126, 16384, 128, 8, 53248, 128256, 8192, theta=5e5),
}


def num_parameters(model: ModelConfig) -> int:
    """Trainable elements of the model, each counted once (tied embeddings too)."""
    kv_size = model.num_kv_heads * (model.hidden_size // model.num_heads)
    attention = 2 * model.hidden_size**2 + 2 * model.hidden_size * kv_size
    ffn = 3 * model.hidden_size * model.ffn_size
    layer = attention + ffn + 2 * model.hidden_size
    embedding = model.vocab_size * model.hidden_size
    tables = embedding if model.tie_embeddings else 2 * embedding
    return model.num_layers * layer + tables + model.hidden_size
