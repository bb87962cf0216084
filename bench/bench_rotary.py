"""rotary beside the usual lines of torch (halves, a product each, joined), and beside a copy."""

from __future__ import annotations

import pytest
import torch
from block_bench import DTYPES, SIZES, assert_alike, copy_peer, forward_and_backward, rows
from conftest import Peer

from mcp_kernels import rotary

HEAD_SIZES = [16, 64, 128]


def rotated(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], -1)
    return (x * cos + turned * sin).to(x.dtype)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.benchmark(group="rotary")
def bench_forward_and_backward(size, dtype, head_size, compare):
    batch = 4
    q, k, dq, dk = (
        rows(size, dtype, seed).view(batch, -1, SIZES[size][1] // head_size, head_size)
        for seed in range(4)
    )
    exponent = torch.arange(0, head_size, 2) / head_size
    angle = torch.outer(torch.arange(q.shape[1]).float(), 1e4**-exponent)
    cos, sin = angle.cos(), angle.sin()
    wide_cos, wide_sin = (t.repeat(1, 2)[:, None] for t in (cos, sin))
    inputs, grads = [q.requires_grad_(), k.requires_grad_()], [dq, dk]
    ours = forward_and_backward(lambda q, k: rotary(q, k, cos, sin), inputs, grads)
    theirs = forward_and_backward(
        lambda q, k: (rotated(q, wide_cos, wide_sin), rotated(k, wide_cos, wide_sin)), inputs, grads
    )
    assert_alike(ours(), theirs(), dtype)
    peers = {"torch": Peer(theirs), "memcpy": copy_peer([q, k] * 2, [q, k] * 2)}
    compare(ours, 8 * q.nbytes, peers, rounds=20)
