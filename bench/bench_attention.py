"""flash_attn_func beside torch's scaled_dot_product_attention, forward and backward, one thread."""

from __future__ import annotations

import pytest
import torch
from conftest import Peer

from mcp_kernels import flash_attn_func

# (B, S, H, N, D): the trainer's small models, then prefill.
SHAPES = [
    (4, 128, 8, 8, 16),
    (4, 128, 8, 4, 16),
    (4, 256, 8, 8, 32),
    (4, 256, 8, 8, 64),
    (1, 2048, 8, 8, 64),
]


def make(shape, dtype):
    batch, rows, heads, kv_heads, dim = shape
    q, k, v = (
        torch.randn(batch, rows, n, dim, dtype=dtype, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    )

    def peer():
        out = torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=heads != kv_heads
        )
        return out.transpose(1, 2)

    def ours():
        return flash_attn_func(q, k, v, causal=True)

    tolerance = max(1e-5, 4 * torch.finfo(dtype).eps)  # the peer's own error is in it
    torch.testing.assert_close(ours(), peer(), rtol=tolerance, atol=tolerance)
    num_bytes = q.element_size() * (2 * q.numel() + k.numel() + v.numel())
    flops = 4 * batch * heads * rows * rows * dim / 2  # causal: half
    return (q, k, v), ours, peer, num_bytes, flops


def note_flops(benchmark, flops):
    if not benchmark.disabled:
        stats = benchmark.stats.stats
        benchmark.extra_info["gflop_per_s"] = {
            "min": float(f"{flops / stats.min / 1e9:.3g}"),
            "median": float(f"{flops / stats.median / 1e9:.3g}"),
        }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_forward(benchmark, compare, shape, dtype):
    _, ours, peer, num_bytes, flops = make(shape, dtype)
    with torch.no_grad():
        compare(ours, num_bytes, {"sdpa": Peer(peer)})
    note_flops(benchmark, flops)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_backward(benchmark, compare, shape, dtype):
    leaves, ours, peer, num_bytes, flops = make(shape, dtype)
    out, peer_out = ours(), peer()
    dout = torch.randn_like(out)

    def backward(result):
        return torch.autograd.grad(result, leaves, dout, retain_graph=True)

    compare(lambda: backward(out), 3 * num_bytes, {"sdpa": Peer(lambda: backward(peer_out))})
    note_flops(benchmark, 2.5 * flops)


@pytest.mark.parametrize("window", [64, 256])
def bench_window(benchmark, compare, window):
    """Keys out of the window are not computed; torch takes a mask and computes them."""
    (q, k, v), _, _, num_bytes, _ = make((1, 2048, 8, 8, 64), torch.float32)
    at = torch.arange(2048)
    mask = (at[:, None] >= at) & (at[:, None] - at <= window)

    def ours():
        return flash_attn_func(q, k, v, window_size=(window, 0))

    def peer():
        return torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=mask
        ).transpose(1, 2)

    with torch.no_grad():
        torch.testing.assert_close(ours(), peer(), rtol=1e-5, atol=1e-5)
        compare(ours, num_bytes, {"sdpa_with_mask": Peer(peer)})
