"""Layers that run on the ops of this package, and what lays a model over ranks with them.

Everything that is about ranks is imported when it is asked for: DTensor costs most of a second.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mcp_kernels.nn.flash_attention import FlashAttention

if TYPE_CHECKING:
    from mcp_kernels.nn.apply_plan import ParallelizeReport, parallelize
    from mcp_kernels.nn.parallel_embedding import VocabParallelEmbedding
    from mcp_kernels.nn.parallel_linear import (
        ColumnParallelLinear,
        RowParallelLinear,
        apply_linears,
    )
    from mcp_kernels.nn.parallel_style import ColumnParallel, Replicated, RowParallel
    from mcp_kernels.nn.plans import llama_plan
    from mcp_kernels.nn.split_linear import (
        SplitLinear,
        WeightGradients,
        deferred_weight_gradients,
        split_linears,
    )

__all__ = [
    "ColumnParallel",
    "ColumnParallelLinear",
    "FlashAttention",
    "ParallelizeReport",
    "Replicated",
    "RowParallel",
    "RowParallelLinear",
    "SplitLinear",
    "VocabParallelEmbedding",
    "WeightGradients",
    "apply_linears",
    "deferred_weight_gradients",
    "llama_plan",
    "parallelize",
    "split_linears",
]

_MODULES = {
    "ColumnParallel": "parallel_style",
    "ColumnParallelLinear": "parallel_linear",
    "ParallelizeReport": "apply_plan",
    "Replicated": "parallel_style",
    "RowParallel": "parallel_style",
    "RowParallelLinear": "parallel_linear",
    "SplitLinear": "split_linear",
    "VocabParallelEmbedding": "parallel_embedding",
    "WeightGradients": "split_linear",
    "apply_linears": "parallel_linear",
    "deferred_weight_gradients": "split_linear",
    "llama_plan": "plans",
    "parallelize": "apply_plan",
    "split_linears": "split_linear",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
