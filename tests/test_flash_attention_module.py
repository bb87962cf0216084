"""nn.FlashAttention: the functions it stands for, its mode and its parameter."""

from __future__ import annotations

import pytest
import torch

from mcp_kernels import flash_attn_func, flash_attn_varlen_func
from mcp_kernels.nn import FlashAttention


def test_equals_the_functions() -> None:
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
    layer = FlashAttention(causal=True, window_size=(2, 0), softcap=3.0, softmax_scale=0.2)
    expected = flash_attn_func(
        q, k, v, causal=True, window_size=(2, 0), softcap=3.0, softmax_scale=0.2
    )
    assert torch.equal(layer(q, k, v), expected)
    ends = torch.tensor([0, 2, 5])
    q, k, v = q[0], k[0], v[0]
    layer = FlashAttention(causal=True)
    expected = flash_attn_varlen_func(q, k, v, ends, ends, 3, 3, causal=True)
    assert torch.equal(layer(q, k, v, cu_seqlens_q=ends), expected)


def test_drops_in_training_only() -> None:
    q = torch.randn(1, 40, 2, 4)
    layer = FlashAttention(dropout_p=0.5)
    assert not torch.equal(layer(q, q, q), flash_attn_func(q, q, q))
    assert torch.equal(layer.eval()(q, q, q), flash_attn_func(q, q, q))


def test_sink_is_learned_and_saved() -> None:
    layer, plain = FlashAttention(2, has_sink=True), FlashAttention()
    assert not list(plain.parameters())
    q = torch.randn(1, 3, 2, 4)
    sink = layer.state_dict()["sink"]
    assert torch.equal(layer(q, q, q), flash_attn_func(q, q, q, sink=sink))
    layer(q, q, q).square().sum().backward()
    grads = [p.grad for p in layer.parameters()]
    assert len(grads) == 1
    assert grads[0] is not None
    assert (grads[0] < 0).all()  # a smaller sink makes the output larger
    with pytest.raises(ValueError, match="FlashAttention: num_heads must be given with has_sink"):
        FlashAttention(has_sink=True)
