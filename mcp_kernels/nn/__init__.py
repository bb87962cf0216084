"""Layers that run on the ops of this package."""

from __future__ import annotations

from mcp_kernels.nn.flash_attention import FlashAttention

__all__ = ["FlashAttention"]
