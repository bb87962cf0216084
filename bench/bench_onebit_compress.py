"""onebit_compress beside torch ops with numpy's packbits, and beside an in-place scale as floor.

Goals: at least 10x the numpy path, at least 0.75 of the in-place scale's bytes a second.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import Peer

from mcp_kernels import build_info, onebit_compress, onebit_decompress, reference_only
from mcp_kernels.testing import assert_same_bits, make_gradient

NUMEL = 1 << 24  # 64 MB of float32: no cache holds it
BLOCK_SIZE = 1024
CHECKED = 1 << 20

if build_info().extensions["_C"]:
    from mcp_kernels import _C

    ISAS = [isa for isa in _C.cpu_isas() if isa != "avx512_bf16"]  # the same body as avx512
else:
    ISAS = []


@pytest.fixture(params=[*ISAS, "reference"])
def path(request):
    """Each body in turn."""
    if request.param == "reference":
        with reference_only():
            yield request.param
        return
    before = _C.cpu_isa()
    _C.set_cpu_isa(request.param)
    yield request.param
    _C.set_cpu_isa(before)


def numpy_compress(x, error):
    """The usual way: torch ops for the values, numpy for the bits."""
    carried = x.float() + error
    scales = carried.view(-1, BLOCK_SIZE).square().mean(dim=1).sqrt()
    positive = carried >= 0
    bits = torch.from_numpy(np.packbits(positive.numpy(), bitorder="little"))
    scale = scales.repeat_interleave(BLOCK_SIZE)
    error.copy_(carried - torch.where(positive, scale, -scale))
    return bits, scales


def numpy_decompress(bits, scales):
    signs = torch.from_numpy(np.unpackbits(bits.numpy(), bitorder="little")).float() * 2 - 1
    return signs * scales.repeat_interleave(BLOCK_SIZE)


def check_once(dtype):
    """A number is worth nothing when the result is wrong."""
    x, error = make_gradient(CHECKED, dtype=dtype), make_gradient(CHECKED, seed=1)
    expected_error = error.clone()
    bits, scales = onebit_compress(x, error, BLOCK_SIZE)
    with reference_only():
        expected = onebit_compress(x, expected_error, BLOCK_SIZE)
        rebuilt = onebit_decompress(bits, scales, CHECKED, BLOCK_SIZE)
    for got, want in zip((bits, scales, error), (*expected, expected_error), strict=True):
        assert_same_bits(got, want)
    assert_same_bits(onebit_decompress(bits, scales, CHECKED, BLOCK_SIZE), rebuilt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.benchmark(group="onebit_compress")
def bench_compress(path, dtype, compare):
    check_once(dtype)
    x, error, scaled = make_gradient(NUMEL, dtype=dtype), torch.zeros(NUMEL), torch.ones(NUMEL)
    peer_error = torch.zeros(NUMEL)
    peers = {"in_place_scale": Peer(lambda: scaled.mul_(1.0000001), 8 * NUMEL)}
    if path != "reference":
        peers["numpy_packbits"] = Peer(lambda: numpy_compress(x, peer_error))
    compare(
        lambda: onebit_compress(x, error, BLOCK_SIZE),
        (dtype.itemsize + 4 + 4 + 1 / 8) * NUMEL,
        peers,
        rounds=3 if path == "reference" else 15,
    )


@pytest.mark.benchmark(group="onebit_decompress")
def bench_decompress(path, compare):
    bits, scales = onebit_compress(make_gradient(NUMEL), torch.zeros(NUMEL), BLOCK_SIZE)
    peers = {"new_zeros_filled": Peer(lambda: torch.empty(NUMEL).fill_(1), 4 * NUMEL)}
    if path != "reference":
        peers["numpy_unpackbits"] = Peer(lambda: numpy_decompress(bits, scales))
    compare(
        lambda: onebit_decompress(bits, scales, NUMEL, BLOCK_SIZE),
        (4 + 1 / 8) * NUMEL,
        peers,
        rounds=3 if path == "reference" else 15,
    )
