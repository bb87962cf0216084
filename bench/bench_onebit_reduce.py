"""onebit_reduce beside an in-place scale and beside torch ops.

Goal: at least 0.9 of the in-place scale's bytes a second for one rank's codes.
"""

from __future__ import annotations

import pytest
import torch
from codec_bench import BLOCK_SIZE, NUMEL, PATHS, in_place_scale, rounds, running_on
from conftest import Peer

from mcp_kernels import onebit_compress, onebit_decompress, onebit_reduce, reference_only
from mcp_kernels.optim.flat_buffer import flat_buffer
from mcp_kernels.testing import assert_same_bits, make_gradient

CHECKED = 1 << 18


def codes_of(world_size, numel):
    coded = [
        onebit_compress(make_gradient(numel, seed=rank), torch.zeros(numel), BLOCK_SIZE)
        for rank in range(world_size)
    ]
    return torch.stack([bits for bits, _ in coded]), torch.stack([scales for _, scales in coded])


def check_once(world_size):
    """A number is worth nothing when the result is wrong."""
    bits, scales = codes_of(world_size, CHECKED)
    error, expected_error = torch.zeros(CHECKED), torch.zeros(CHECKED)
    actual = (*onebit_reduce(bits, scales, error, None, BLOCK_SIZE), error)
    with reference_only():
        expected = onebit_reduce(bits, scales, expected_error, None, BLOCK_SIZE)
    for got, want in zip(actual, (*expected, expected_error), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("world_size", [1, 2, 8])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.benchmark(group="onebit_reduce")
def bench_reduce(path, world_size, compare):
    bits, scales = codes_of(world_size, NUMEL)
    error, own_error = flat_buffer(NUMEL), flat_buffer(NUMEL)

    def apart():
        total = onebit_decompress(bits[0], scales[0], NUMEL, BLOCK_SIZE)
        for rank in range(1, world_size):
            total += onebit_decompress(bits[rank], scales[rank], NUMEL, BLOCK_SIZE)
        onebit_compress(total.mul_(1 / world_size), own_error, BLOCK_SIZE)

    with running_on(path):
        check_once(world_size)
        compare(
            lambda: onebit_reduce(bits, scales, error, None, BLOCK_SIZE),
            (world_size / 8 + 8 + 1 / 8) * NUMEL,
            {"in_place_scale": in_place_scale(), "decompress_add_compress": Peer(apart)},
            rounds=rounds(path),
        )
