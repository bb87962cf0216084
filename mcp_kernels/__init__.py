"""Drop-in kernels for training Transformers: attention, matmul with its collective, 1-bit Adam.

Each op is defined by its plain-PyTorch reference; compiled and Triton bodies replace it on their
dispatch key. ``build_info()`` says what was built, ``which_backend()`` what would run and why.
"""

from __future__ import annotations

from mcp_kernels._backends import BackendChoice, which_backend
from mcp_kernels._build_info import BuildInfo, build_info, load_extension
from mcp_kernels._op import reference_only
from mcp_kernels._version import __version__
from mcp_kernels.ops.onebit_compress import onebit_compress, onebit_decompress

__all__ = [
    "BackendChoice",
    "BuildInfo",
    "__version__",
    "build_info",
    "onebit_compress",
    "onebit_decompress",
    "reference_only",
    "which_backend",
]

load_extension()
