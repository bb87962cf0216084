"""Drop-in kernels for training Transformers: attention, matmul with its collective, 1-bit Adam.

Each op is defined by its plain-PyTorch reference; compiled and Triton bodies replace it on their
dispatch key. ``build_info()`` says what was built, ``which_backend()`` what would run and why.
"""

from __future__ import annotations

from mcp_kernels._backends import BackendChoice, which_backend
from mcp_kernels._build_info import BuildInfo, build_info, load_extension
from mcp_kernels._op import reference_only
from mcp_kernels._version import __version__
from mcp_kernels.ops.all_gather_matmul import all_gather_matmul
from mcp_kernels.ops.attention_functions import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)
from mcp_kernels.ops.attention_kvcache import flash_attn_with_kvcache
from mcp_kernels.ops.attention_sdpa import scaled_dot_product_attention
from mcp_kernels.ops.attention_varlen_functions import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from mcp_kernels.ops.collectives import all_gather, all_reduce, copy_to_group, reduce_scatter
from mcp_kernels.ops.compressed_all_reduce import compressed_all_reduce
from mcp_kernels.ops.fp8_compress import fp8_compress, fp8_decompress, fp8_quantize, fp8_reduce
from mcp_kernels.ops.int4_compress import int4_compress, int4_decompress, int4_quantize, int4_reduce
from mcp_kernels.ops.int8_compress import int8_compress, int8_decompress, int8_quantize, int8_reduce
from mcp_kernels.ops.matmul_all_reduce import matmul_all_reduce
from mcp_kernels.ops.matmul_reduce_scatter import matmul_reduce_scatter
from mcp_kernels.ops.merge_attention import merge_attention
from mcp_kernels.ops.onebit_adam_update import onebit_adam_update
from mcp_kernels.ops.onebit_all_reduce import onebit_all_reduce, onebit_buffers
from mcp_kernels.ops.onebit_compress import onebit_compress, onebit_decompress
from mcp_kernels.ops.onebit_compress_momentum import onebit_compress_momentum
from mcp_kernels.ops.onebit_reduce import onebit_reduce
from mcp_kernels.ops.rms_norm import add_rms_norm, rms_norm
from mcp_kernels.ops.rotary import rotary
from mcp_kernels.ops.swiglu import swiglu
from mcp_kernels.symmetric import register as register_symmetric
from mcp_kernels.triton import register as register_triton

__all__ = [
    "BackendChoice",
    "BuildInfo",
    "__version__",
    "add_rms_norm",
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "build_info",
    "compressed_all_reduce",
    "copy_to_group",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "fp8_compress",
    "fp8_decompress",
    "fp8_quantize",
    "fp8_reduce",
    "int4_compress",
    "int4_decompress",
    "int4_quantize",
    "int4_reduce",
    "int8_compress",
    "int8_decompress",
    "int8_quantize",
    "int8_reduce",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "merge_attention",
    "onebit_adam_update",
    "onebit_all_reduce",
    "onebit_buffers",
    "onebit_compress",
    "onebit_compress_momentum",
    "onebit_decompress",
    "onebit_reduce",
    "reduce_scatter",
    "reference_only",
    "rms_norm",
    "rotary",
    "scaled_dot_product_attention",
    "swiglu",
    "which_backend",
]

load_extension()
register_symmetric()
register_triton()
