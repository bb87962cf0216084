"""The section of 1-bit Adam's step and of int8, int4, fp8: bits of the CPU, speed of a copy."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mcp_kernels.gpu_check.report import Check, Measurement, Section
from mcp_kernels.gpu_check.timing import Bench, copy_gbps, ours_of
from mcp_kernels.ops.block_layout import BlockLayout
from mcp_kernels.testing import assert_same_bits, make_gradient

BLOCK_SIZE = 1024
# One element, a short block, blocks and a rest, and more than 2^24 of them.
SIZES = (1, 1000, 5 * BLOCK_SIZE + 3, (1 << 24) + 9)
CODECS = {"int8": 1.0, "int4": 0.5, "fp8": 1.0}
"""Bytes of a code."""

Get = Callable[[str], Callable[..., Any]]


def bodies() -> dict[str, Get]:
    """The ops as they dispatch, and the Triton bodies where CUDA ones may stand before them."""
    found: dict[str, Get] = {"op": lambda name: getattr(torch.ops.mcp_kernels, name)}
    if importlib.util.find_spec("triton") is not None:
        found["triton"] = _triton_body
    return found


def _triton_body(name: str) -> Callable[..., Any]:
    from mcp_kernels.triton import BODIES

    module, function = BODIES[name].split(":")
    return getattr(importlib.import_module(module), function)


class Inputs:
    """A state of 1-bit Adam for three tensors of ``numel`` elements in all, on one device."""

    def __init__(self, numel: int, device: torch.device) -> None:
        sizes = [numel // 2, numel // 3, numel - numel // 2 - numel // 3]
        layout = BlockLayout(sizes, BLOCK_SIZE)
        elements = layout.padded_numel
        types = (torch.float32, torch.bfloat16, torch.float16)
        self.grads = [
            make_gradient(size, seed=i, dtype=types[i], device=str(device))
            for i, size in enumerate(sizes)
        ]
        generator = torch.Generator().manual_seed(9)
        bits = torch.randint(0, 256, (2, elements // 8), dtype=torch.uint8, generator=generator)
        scales = make_gradient(2 * layout.num_blocks, seed=7).abs().view(2, -1)
        self.bits, self.scales = bits.to(device), scales.to(device)
        valid = torch.arange(BLOCK_SIZE) < layout.counts()[:, None]
        error = make_gradient(elements, seed=8) / 4 * valid.view(-1)
        self.error, self.counts = error.to(device), layout.counts(device)
        self.params = [make_gradient(size, seed=3 + i).to(device) for i, size in enumerate(sizes)]
        self.denom = (make_gradient(elements, seed=5).abs() + 1e-3).to(device)
        self.factors = self.denom.reciprocal().to(torch.bfloat16)

    def momentum(self, get: Get, error: Tensor) -> tuple[Tensor, ...]:
        """(bits, scales) of onebit_compress_momentum."""
        body = get("onebit_compress_momentum")
        given = (self.grads, self.bits[0], self.scales[0], error, 0.9, 0.5, BLOCK_SIZE)
        return body(*given, self.factors)

    def reduce(self, get: Get, error: Tensor) -> tuple[Tensor, ...]:
        """(bits, scales) of onebit_reduce of two ranks."""
        return get("onebit_reduce")(self.bits, self.scales, error, self.counts, BLOCK_SIZE)

    def update(self, get: Get, params: list[Tensor], denom: Tensor | None = None) -> None:
        """onebit_adam_update of ``params``, where there is no ``denom`` under a mask."""
        given = (params, denom, self.bits[0], self.scales[0], 1e-3, 1e-3)
        moves = self.bits[1] if denom is None else None
        get("onebit_adam_update")(*given, [0.1] * len(params), BLOCK_SIZE, None, moves)


def results(inputs: Inputs, get: Get) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """What each op gives and leaves behind, by name; ``inputs`` stays as it is."""
    error = inputs.error.clone()
    yield "onebit_compress_momentum", (*inputs.momentum(get, error), error)
    error = inputs.error.clone()
    yield "onebit_reduce", (*inputs.reduce(get, error), error)
    params = [param.clone() for param in inputs.params]
    inputs.update(get, params)
    divided = [param.clone() for param in inputs.params]
    inputs.update(get, divided, inputs.denom)
    yield "onebit_adam_update", (*params, *divided)
    for codec in CODECS:
        error = inputs.error.clone()
        codes, scales = get(f"{codec}_compress")(inputs.denom, error, BLOCK_SIZE)
        yield f"{codec}_compress", (codes, scales, error)
        values = get(f"{codec}_decompress")(codes, scales, error.numel(), BLOCK_SIZE)
        yield f"{codec}_decompress", (values,)
        pair = (torch.stack((codes, codes)), torch.stack((scales, scales)))
        error = inputs.error.clone()
        reduced = get(f"{codec}_reduce")(*pair, error, inputs.counts, BLOCK_SIZE)
        yield f"{codec}_reduce", (*reduced, error)


def check(device: torch.device, sizes: tuple[int, ...] = SIZES) -> Iterator[Check]:
    """What each body of each op gives equals what the CPU gives."""
    for numel in sizes:
        expected = dict(results(Inputs(numel, torch.device("cpu")), bodies()["op"]))
        there = Inputs(numel, device)
        for name, get in bodies().items():
            for op, actual in results(there, get):
                detail = "equal bits"
                try:
                    for got, want in zip(actual, expected[op], strict=True):
                        assert_same_bits(got.cpu(), want)
                except AssertionError as difference:
                    detail = str(difference)
                yield Check(f"{name} {op} of {numel}", detail == "equal bits", detail)


def measure(bench: Bench, numel: int = 1 << 27) -> Iterator[Measurement]:
    """GB/s that each op has to move, beside a copy on the device; whole steps beside AdamW."""
    inputs = Inputs(numel, bench.device)
    copy = copy_gbps(bench, 4 * numel)
    error, params = inputs.error.clone(), [param.clone() for param in inputs.params]
    for name, get in bodies().items():
        runs: dict[str, tuple[Callable[[], object], float]] = {
            # Half the gradients are float32.
            "onebit_compress_momentum": (lambda get=get: inputs.momentum(get, error), 13.25),
            "onebit_reduce": (lambda get=get: inputs.reduce(get, error), 8.375),
            "onebit_adam_update": (lambda get=get: inputs.update(get, params), 8.25),
        }
        for codec, wire in CODECS.items():
            body = functools.partial(get(f"{codec}_compress"), inputs.denom, error, BLOCK_SIZE)
            runs[f"{codec}_compress"] = (body, 12 + wire)
        for op, (run, bytes_each) in runs.items():
            rates = bench.rates({"ours": run}, numel * bytes_each / 1e9)
            ours = ours_of(rates, "ours")
            peers: dict[str, float | str] = {"device copy": copy}
            yield Measurement(f"{name} {op}, {numel} elements", "GB/s", ours, peers, peak=copy)
    yield _whole_step(bench, inputs, error, params)


def _whole_step(bench: Bench, inputs: Inputs, error: Tensor, params: list[Tensor]) -> Measurement:
    """Steps a second of compression and update, beside torch's fused AdamW."""
    get = bodies()["op"]
    weights = [torch.nn.Parameter(param.clone()) for param in inputs.params]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    adamw = torch.optim.AdamW(weights, lr=1e-6, fused=True)

    def step() -> None:
        inputs.momentum(get, error)
        inputs.update(get, params)

    rates = bench.rates({"ours": step, "AdamW(fused=True)": adamw.step}, 1.0)
    peers = {"AdamW(fused=True)": rates["AdamW(fused=True)"]}
    return Measurement("a step of one rank", "steps/s", ours_of(rates, "ours"), peers)


SECTION = Section("onebit_step", check, measure)
