"""swiglu beside torch's silu and product, and beside a copy of as many bytes."""

from __future__ import annotations

import pytest
import torch
from block_bench import DTYPES, SIZES, assert_alike, copy_peer, forward_and_backward, rows
from conftest import Peer
from torch.nn.functional import silu

from mcp_kernels import swiglu


def torch_swiglu(gate, up):
    return silu(gate) * up


def make(size, dtype):
    width = SIZES[size][1] * 8 // 3
    return [rows(size, dtype, seed, width) for seed in range(3)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.benchmark(group="swiglu")
def bench_forward(size, dtype, compare):
    gate, up, _ = make(size, dtype)
    with torch.no_grad():
        y = swiglu(gate, up)
        assert_alike([y], [torch_swiglu(gate, up)], dtype)
        peers = {
            "torch": Peer(lambda: torch_swiglu(gate, up)),
            "memcpy": copy_peer([gate, up], [y]),
        }
        compare(lambda: swiglu(gate, up), 3 * y.nbytes, peers, rounds=30)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.benchmark(group="swiglu")
def bench_forward_and_backward(size, dtype, compare):
    gate, up, dy = make(size, dtype)
    inputs = [gate.requires_grad_(), up.requires_grad_()]
    ours = forward_and_backward(swiglu, inputs, dy)
    theirs = forward_and_backward(torch_swiglu, inputs, dy)
    assert_alike(ours(), theirs(), dtype)
    peers = {"torch": Peer(theirs), "memcpy": copy_peer([dy] * 5, [dy] * 3)}
    compare(ours, 8 * dy.nbytes, peers, rounds=30)
