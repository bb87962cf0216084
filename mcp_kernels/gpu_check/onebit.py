"""The section of onebit_compress: the bits of the CPU, at the speed of a copy."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mcp_kernels.gpu_check.report import Check, Measurement, Section
from mcp_kernels.gpu_check.timing import Bench, copy_gbps, ours_of
from mcp_kernels.ops.onebit_compress import onebit_compress
from mcp_kernels.testing import assert_same_bits, make_gradient

BLOCK_SIZE = 1024
# One element, a short block, blocks and a rest, and more than 2^24 of them.
SIZES = (1, 1000, 5 * BLOCK_SIZE + 3, (1 << 24) + 9)

Body = Callable[[Tensor, Tensor, int], Any]


def bodies() -> dict[str, Body]:
    """The op as it dispatches, and the Triton body where a CUDA one may stand before it."""
    found: dict[str, Body] = {"op": onebit_compress}
    if importlib.util.find_spec("triton") is not None:
        from mcp_kernels.triton.onebit_compress import onebit_compress as triton_body

        found["triton"] = triton_body
    return found


def check(device: torch.device, sizes: tuple[int, ...] = SIZES) -> Iterator[Check]:
    """Bits, scales and the new error of each body equal those of the CPU."""
    for numel in sizes:
        x, error = make_gradient(numel, seed=1), make_gradient(numel, seed=2)
        expected_error = error.clone()
        expected = (*onebit_compress(x, expected_error, BLOCK_SIZE), expected_error)
        for name, body in bodies().items():
            own_error = error.to(device, copy=True)
            actual = (*body(x.to(device), own_error, BLOCK_SIZE), own_error)
            detail = "equal bits"
            try:
                for got, want in zip(actual, expected, strict=True):
                    assert_same_bits(got.cpu(), want)
            except AssertionError as difference:
                detail = str(difference)
            yield Check(f"{name} of {numel}", detail == "equal bits", detail)


def measure(bench: Bench, numel: int = 1 << 27) -> Iterator[Measurement]:
    """GB/s that a compression has to move, beside a copy on the device."""
    x = make_gradient(1 << 20).repeat(max(1, numel >> 20))[:numel].to(bench.device)
    error = torch.zeros_like(x)
    # Reads the gradient and the error, writes the error and a bit an element.
    num_bytes = numel * (4 + 4 + 4 + 1 / 8)
    copy = copy_gbps(bench, 4 * numel)
    for name, body in bodies().items():
        run = functools.partial(body, x, error, BLOCK_SIZE)
        rates = bench.rates({"ours": run}, num_bytes / 1e9)
        yield Measurement(
            f"{name}, {numel} elements",
            "GB/s",
            ours_of(rates, "ours"),
            {"device copy": copy},
            peak=copy,
        )


SECTION = Section("onebit_compress", check, measure)
