"""Triton bodies, put on the CUDA key where no CUDA C++ body was built.

Triton is imported in this folder only. ``register()`` does not import it: the module of a body is
imported at the body's first call.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from mcp_kernels._op import has_body, override
from mcp_kernels.symmetric.refuses import (
    refuses_all_gather_matmul,
    refuses_matmul_all_reduce,
    refuses_matmul_reduce_scatter,
    refuses_matmul_reduce_scatter_backward,
)
from mcp_kernels.triton import rms_norm_refuses
from mcp_kernels.triton.flash_attn_refuses import refuses, refuses_backward

# op -> "module:function" of its body. A new Triton body is one line here.
BODIES = {
    "add_rms_norm": "mcp_kernels.triton.rms_norm:add_rms_norm",
    "all_gather_matmul": "mcp_kernels.triton.all_gather_matmul:all_gather_matmul",
    "flash_attn": "mcp_kernels.triton.flash_attn:flash_attn",
    "flash_attn_bwd": "mcp_kernels.triton.flash_attn:flash_attn_bwd",
    "flash_attn_kvcache": "mcp_kernels.triton.flash_attn:flash_attn_kvcache",
    "flash_attn_varlen": "mcp_kernels.triton.flash_attn:flash_attn_varlen",
    "flash_attn_varlen_bwd": "mcp_kernels.triton.flash_attn:flash_attn_varlen_bwd",
    "fp8_compress": "mcp_kernels.triton.scaled_codec:fp8_compress",
    "fp8_decompress": "mcp_kernels.triton.scaled_codec:fp8_decompress",
    "fp8_reduce": "mcp_kernels.triton.scaled_codec:fp8_reduce",
    "int4_compress": "mcp_kernels.triton.scaled_codec:int4_compress",
    "int4_decompress": "mcp_kernels.triton.scaled_codec:int4_decompress",
    "int4_reduce": "mcp_kernels.triton.scaled_codec:int4_reduce",
    "int8_compress": "mcp_kernels.triton.scaled_codec:int8_compress",
    "int8_decompress": "mcp_kernels.triton.scaled_codec:int8_decompress",
    "int8_reduce": "mcp_kernels.triton.scaled_codec:int8_reduce",
    "matmul_all_reduce": "mcp_kernels.triton.matmul_all_reduce:matmul_all_reduce",
    "matmul_reduce_scatter": "mcp_kernels.triton.matmul_reduce_scatter:matmul_reduce_scatter",
    "matmul_reduce_scatter_backward": (
        "mcp_kernels.triton.matmul_reduce_scatter:matmul_reduce_scatter_backward"
    ),
    "onebit_adam_update": "mcp_kernels.triton.onebit_adam_update:onebit_adam_update",
    "onebit_compress": "mcp_kernels.triton.onebit_compress:onebit_compress",
    "onebit_compress_momentum": (
        "mcp_kernels.triton.onebit_compress_momentum:onebit_compress_momentum"
    ),
    "onebit_decompress": "mcp_kernels.triton.onebit_compress:onebit_decompress",
    "onebit_reduce": "mcp_kernels.triton.onebit_reduce:onebit_reduce",
    "rms_norm": "mcp_kernels.triton.rms_norm:rms_norm",
    "rms_norm_bwd": "mcp_kernels.triton.rms_norm:rms_norm_bwd",
    "swiglu": "mcp_kernels.triton.swiglu:swiglu",
    "swiglu_bwd": "mcp_kernels.triton.swiglu:swiglu_bwd",
}

# What a body leaves to the reference; one that is not here takes every call.
REFUSALS: dict[str, Callable[..., str | None]] = {
    "add_rms_norm": rms_norm_refuses.refuses,
    "all_gather_matmul": refuses_all_gather_matmul,
    "flash_attn": refuses,
    "flash_attn_bwd": refuses_backward,
    "flash_attn_kvcache": refuses,
    "flash_attn_varlen": refuses,
    "flash_attn_varlen_bwd": refuses_backward,
    "matmul_all_reduce": refuses_matmul_all_reduce,
    "matmul_reduce_scatter": refuses_matmul_reduce_scatter,
    "matmul_reduce_scatter_backward": refuses_matmul_reduce_scatter_backward,
    "rms_norm": rms_norm_refuses.refuses,
    "rms_norm_bwd": rms_norm_refuses.refuses_backward,
}


def register() -> None:
    """Register every body of ``BODIES`` where torch has GPUs of its own and Triton is installed."""
    if torch.version.cuda is None and torch.version.hip is None:
        return
    if importlib.util.find_spec("triton") is None:
        return
    for op, body in BODIES.items():
        if not has_body(op, "CUDA"):
            override(op, body, "CUDA", backend="triton", refuses=REFUSALS.get(op))
