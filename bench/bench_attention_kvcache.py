"""One decoding step with flash_attn_with_kvcache beside torch's SDPA over the filled cache.

Torch has no pages: beside a paged cache it gathers the entries' pages first.
"""

from __future__ import annotations

import pytest
import torch
from conftest import Peer
from roofline import read_all

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
        q_t, k_t, v_t = (t.transpose(1, 2) for t in (q, k_cache, v_cache))
        out = torch.nn.functional.scaled_dot_product_attention(
            q_t, k_t, v_t, enable_gqa=kv_heads != heads
        )
        return out.transpose(1, 2)

    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(ours(), peer(), rtol=8 * eps, atol=8 * eps)
    num_bytes = k_cache.element_size() * 2 * k_cache.numel()
    compare(ours, num_bytes, {"sdpa": Peer(peer), "read": read_peer(k_cache, v_cache)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [16, 256])
def bench_decode_from_pages(compare, page_size, dtype):
    """Four entries of 1024 keys in pages in random order, one new key each."""
    batch, heads, kv_heads, dim, length = 4, 32, 8, 128, 1024
    pages = length // page_size
    q = torch.randn(batch, 1, heads, dim, dtype=dtype)
    k, v = (torch.randn(batch, 1, kv_heads, dim, dtype=dtype) for _ in range(2))
    shape = (batch * pages, page_size, kv_heads, dim)
    k_cache, v_cache = (torch.randn(shape, dtype=dtype) for _ in range(2))
    table = torch.randperm(batch * pages).view(batch, pages)
    lengths = torch.full((batch,), length - 1, dtype=torch.int32)

    def ours():
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table
        )

    def peer():
        rows = []
        for cache, new in ((k_cache, k), (v_cache, v)):
            cache[table[:, -1], -1] = new[:, 0]
            rows.append(cache[table].view(batch, length, kv_heads, dim).transpose(1, 2))
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), rows[0], rows[1], enable_gqa=True
        )
        return out.transpose(1, 2)

    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(ours(), peer(), rtol=8 * eps, atol=8 * eps)
    num_bytes = 2 * k_cache.element_size() * k_cache.numel()
    compare(ours, num_bytes, {"gather_and_sdpa": Peer(peer), "read": read_peer(k_cache, v_cache)})


def read_peer(*caches):
    """Reading the same bytes once: what no kernel can be faster than."""
    num_bytes = sum(cache.numel() * cache.element_size() for cache in caches)
    return Peer(read_all(caches), num_bytes)
