"""Model shapes by name, how the ones of ours are trained, and how many parameters a shape has.

Published shapes are of Llama's family. No torch.

GPT-3 (Brown et al. 2020, table 2.1) has LayerNorm, GELU and learned positions; its rows keep
layers, width, heads, vocabulary, context and tied embeddings, and take the SwiGLU width that costs
what its 4 * hidden_size GELU layer cost: 8/3 * hidden_size, rounded up to a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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


Shape = Mapping[str, int | float | str | None]

_IMAGE_KEYS = ("image_size", "patch_size", "channels", "num_classes")


def _shape(*sizes: int, tied: bool = False, theta: float = 10000.0) -> Shape:
    shape = dict(zip(_SIZE_KEYS, sizes, strict=True))
    shared = {"tie_embeddings": tied, "rope_theta": theta, "norm_eps": 1e-5}
    return {"family": "llama", **shape, **shared, **dict.fromkeys(_IMAGE_KEYS)}


def _vit(*sizes: int, image: tuple[int, int, int, int]) -> Shape:
    image_size, patch_size, _, num_classes = image
    shape = _shape(*sizes, num_classes, (image_size // patch_size) ** 2)
    return {**shape, "family": "vit", **dict(zip(_IMAGE_KEYS, image, strict=True))}


# layers, hidden, heads, kv heads, ffn, vocabulary, context
PRESETS: Mapping[str, Shape] = {
    # Ours: bytes as tokens, trains visibly on two CPU cores in a minute.
    "tiny": _shape(4, 128, 8, 4, 352, 256, 128),
    # Ours: reads 8 x 8 gray digits as 16 patches of 2 x 2.
    "vit-digits": _vit(4, 64, 4, 4, 256, image=(8, 2, 1, 10)),
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

# Values of other tables that come with a preset.
RECIPES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "vit-digits": {
        "train": {"steps": 400, "global_batch_size": 64, "micro_batch_size": 16, "lr": 2e-3},
    },
}


def num_parameters(model: ModelConfig) -> int:
    """Trainable elements of the model, each counted once (tied embeddings too)."""
    return _num_vit(model) if model.family == "vit" else _num_llama(model)


def _num_vit(model: ModelConfig) -> int:
    hidden, ffn = model.hidden_size, model.ffn_size
    kv_size = model.num_kv_heads * (hidden // model.num_heads)
    norm = 2 * hidden
    # Queries, values and the output have biases, keys have none (see ``model/vit.py``).
    attention = 2 * hidden**2 + 2 * hidden * kv_size + 2 * hidden + kv_size
    layer = attention + 2 * hidden * ffn + ffn + hidden + 2 * norm
    pixels = (model.patch_size or 0) ** 2 * (model.channels or 0)
    embedding = (pixels + 1 + model.seq_len) * hidden
    return model.num_layers * layer + embedding + norm + (hidden + 1) * model.vocab_size


def _num_llama(model: ModelConfig) -> int:
    kv_size = model.num_kv_heads * (model.hidden_size // model.num_heads)
    attention = 2 * model.hidden_size**2 + 2 * model.hidden_size * kv_size
    ffn = 3 * model.hidden_size * model.ffn_size
    layer = attention + ffn + 2 * model.hidden_size
    embedding = model.vocab_size * model.hidden_size
    tables = embedding if model.tie_embeddings else 2 * embedding
    return model.num_layers * layer + tables + model.hidden_size
