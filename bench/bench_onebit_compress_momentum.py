"""onebit_compress_momentum beside an in-place scale and beside the same step in torch ops.

Goal: at least 0.9 of the in-place scale's bytes a second.
"""

from __future__ import annotations

import pytest
import torch
from codec_bench import BLOCK_SIZE, NUMEL, PATHS, gradient, in_place_scale, rounds, running_on
from conftest import Peer

from mcp_kernels import onebit_compress, onebit_compress_momentum, reference_only
from mcp_kernels.optim.flat_buffer import flat_buffer
from mcp_kernels.testing import assert_same_bits, make_gradient

CHECKED = 1 << 20


def state(numel, seed=1):
    bits, scales = onebit_compress(make_gradient(numel, seed=seed), torch.zeros(numel), BLOCK_SIZE)
    return bits, scales, flat_buffer(numel)


def check_once(dtype):
    """A number is worth nothing when the result is wrong."""
    grads = list(make_gradient(CHECKED, dtype=dtype).split(CHECKED // 4))
    bits, scales, error = state(CHECKED)
    expected_error = error.clone()
    factors = make_gradient(CHECKED, seed=2, dtype=torch.bfloat16)
    how = {"beta1": 0.9, "block_size": BLOCK_SIZE, "preconditioner": factors}
    actual = (*onebit_compress_momentum(grads, bits, scales, error, **how), error)
    with reference_only():
        expected = onebit_compress_momentum(grads, bits, scales, expected_error, **how)
    for got, want in zip(actual, (*expected, expected_error), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.benchmark(group="onebit_compress_momentum")
def bench_compress_momentum(path, dtype, compare):
    grad = gradient(dtype=dtype)
    bits, scales, error = state(NUMEL)
    momentum, carried = flat_buffer(NUMEL), flat_buffer(NUMEL)
    factors = gradient(dtype=torch.bfloat16, seed=2)
    how = {"beta1": 0.9, "block_size": BLOCK_SIZE, "preconditioner": factors}

    def in_torch_ops():
        momentum.lerp_(grad.float() * factors, 0.1)
        onebit_compress(momentum, carried, BLOCK_SIZE)

    with running_on(path):
        check_once(dtype)
        compare(
            lambda: onebit_compress_momentum([grad], bits, scales, error, **how),
            (dtype.itemsize + 2 + 4 + 4 + 1 / 4) * NUMEL,
            {"in_place_scale": in_place_scale(), "lerp_then_compress": Peer(in_torch_ops)},
            rounds=rounds(path),
        )
