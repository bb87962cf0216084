"""One decoding step with flash_attn_with_kvcache beside torch's SDPA over the filled cache."""

from __future__ import annotations

import pytest
import torch
from conftest import Peer

from mcp_kernels import flash_attn_with_kvcache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_heads", [8, 32])
def bench_decode(compare, kv_heads, dtype):
    heads, dim, length = 32, 128, 2048
    q = torch.randn(1, 1, heads, dim, dtype=dtype)
    k_cache, v_cache = (torch.randn(1, length, kv_heads, dim, dtype=dtype) for _ in range(2))

    def ours():
        return flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=length)

    def peer():
        return torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k_cache, v_cache)), enable_gqa=kv_heads != heads
        ).transpose(1, 2)

    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(ours(), peer(), rtol=8 * eps, atol=8 * eps)
    num_bytes = k_cache.element_size() * 2 * k_cache.numel()
    compare(ours, num_bytes, {"sdpa": Peer(peer)})
