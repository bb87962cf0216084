"""rms_norm beside torch's, and add_rms_norm beside an addition and torch's norm; forward, backward.

``bandwidth_over_memcpy`` is what the op moves a second over what a copy of as many bytes does.
"""

from __future__ import annotations

import pytest
import torch
from block_bench import DTYPES, SIZES, assert_alike, copy_peer, forward_and_backward, rows
from conftest import Peer

from mcp_kernels import add_rms_norm, rms_norm

EPS = 1e-5


def torch_norm(x, weight):
    return torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.benchmark(group="rms_norm")
def bench_forward(size, dtype, compare):
    x, weight = rows(size, dtype), rows(size, dtype, 1)[0]
    y = rms_norm(x, weight, EPS)
    assert_alike([y], [torch_norm(x, weight)], dtype)
    compare(
        lambda: rms_norm(x, weight, EPS),
        x.nbytes + y.nbytes,
        {"torch": Peer(lambda: torch_norm(x, weight)), "memcpy": copy_peer([x], [y])},
        rounds=40,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.benchmark(group="rms_norm")
def bench_forward_and_backward(size, dtype, compare):
    inputs = [rows(size, dtype).requires_grad_(), rows(size, dtype, 1)[0].clone().requires_grad_()]
    dy = rows(size, dtype, 2)
    ours = forward_and_backward(lambda x, w: rms_norm(x, w, EPS), inputs, dy)
    theirs = forward_and_backward(torch_norm, inputs, dy)
    assert_alike(ours(), theirs(), dtype)
    moved = [[dy] * 3, [dy] * 2]  # x twice and dy, y and dx
    num_bytes = 5 * dy.nbytes
    peers = {"torch": Peer(theirs), "memcpy": copy_peer(*moved)}
    compare(ours, num_bytes, peers, rounds=40)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.benchmark(group="add_rms_norm")
def bench_after_addition(size, dtype, compare):
    inputs = [rows(size, dtype, i).requires_grad_() for i in range(2)]
    inputs.append(rows(size, dtype, 2)[0].clone().requires_grad_())
    grads = [rows(size, dtype, i) for i in (3, 4)]

    def torch_both(x, residual, weight):
        total = x + residual
        return torch_norm(total, weight), total

    ours = forward_and_backward(lambda x, r, w: add_rms_norm(x, r, w, EPS), inputs, grads)
    theirs = forward_and_backward(torch_both, inputs, grads)
    assert_alike(ours(), theirs(), dtype)
    one = grads[0]
    peers = {"torch": Peer(theirs), "memcpy": copy_peer([one] * 5, [one] * 3)}
    compare(ours, 8 * one.nbytes, peers, rounds=40)
