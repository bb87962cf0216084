"""The bench that int8, int4 and fp8 share: compress, decompress and reduce beside a floor."""

from __future__ import annotations

import torch
from codec_bench import BLOCK_SIZE, NUMEL, gradient, in_place_scale, rounds, running_on
from conftest import Peer

import mcp_kernels
from mcp_kernels import reference_only
from mcp_kernels.optim.flat_buffer import flat_buffer
from mcp_kernels.testing import assert_same_bits, make_gradient

CHECKED = 1 << 18


def ops_of(codec):
    return [
        getattr(mcp_kernels, f"{codec}_{what}") for what in ("compress", "decompress", "reduce")
    ]


def check_once(codec):
    """A number is worth nothing when the result is wrong."""
    compress, decompress, reduce = ops_of(codec)

    def run():
        error, server_error = torch.zeros(CHECKED), torch.zeros(CHECKED)
        codes, scales = compress(make_gradient(CHECKED), error, BLOCK_SIZE)
        values = decompress(codes, scales, CHECKED, BLOCK_SIZE)
        again = reduce(codes[None], scales[None], server_error, None, BLOCK_SIZE)
        return codes, scales, error, values, *again, server_error

    actual = run()
    with reference_only():
        expected = run()
    for got, want in zip(actual, expected, strict=True):
        assert_same_bits(got, want)


def bench_codec(codec, bits_each, what, path, compare):
    """Time one op of a codec; bytes are those that it has to move."""
    compress, decompress, reduce = ops_of(codec)
    x, error = gradient(), flat_buffer(NUMEL)
    codes, scales = compress(x, error, BLOCK_SIZE)
    wire = bits_each / 8
    pairs, pair_scales = torch.stack((codes, codes)), torch.stack((scales, scales))
    calls = {
        "compress": (lambda: compress(x, error, BLOCK_SIZE), 12 + wire),
        "decompress": (lambda: decompress(codes, scales, NUMEL, BLOCK_SIZE), 4 + wire),
        "reduce": (lambda: reduce(pairs, pair_scales, error, None, BLOCK_SIZE), 8 + 3 * wire),
    }
    ours, bytes_each = calls[what]
    peers = {"in_place_scale": in_place_scale()}
    if what == "decompress":
        peers["new_filled"] = Peer(lambda: torch.empty(NUMEL).fill_(1), 4 * NUMEL)
    with running_on(path):
        check_once(codec)
        compare(ours, bytes_each * NUMEL, peers, rounds=rounds(path))
