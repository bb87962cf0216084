"""Speed of the tensor-parallel kernels on one GPU: beside cuBLAS, and beside matmul then sum."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from mcp_kernels.gpu_check.attention_speed import peak_tflops
from mcp_kernels.gpu_check.report import Measurement
from mcp_kernels.gpu_check.timing import Bench, copy_gbps, ours_of
from mcp_kernels.gpu_check.virtual_ranks import VirtualRanks
from mcp_kernels.ops.matmul_all_reduce import matmul_all_reduce
from mcp_kernels.symmetric import all_reduce as cuda_all_reduce
from mcp_kernels.symmetric.layout import CUDA_ROWS, Layout
from mcp_kernels.symmetric.peers import Peers

Body = Callable[[], object]


@dataclass(frozen=True, slots=True)
class SpeedSizes:
    """Sizes of the goals; tests on a CPU take small ones."""

    cubes: tuple[int, ...] = (4096, 8192)
    worlds: tuple[int, ...] = (2, 4)
    small_rows: tuple[int, ...] = (16, 64)
    features: int = 4096
    inner: int = 2048
    """K of a rank."""
    reduced: int = 1 << 24
    """Elements of a rank in the reduction."""
    slot_bytes: int = 128 << 20
    num_rows: int = 8193


def _inputs(bench: Bench, count: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator(device=bench.device).manual_seed(0)
    return [
        torch.randn(shape, generator=generator, device=bench.device).to(torch.bfloat16)
        for _ in range(count)
    ]


def _fused(ranks: VirtualRanks, xs: list[Tensor], weights: list[Tensor]) -> Body:
    from mcp_kernels.triton.matmul_reduce_launch import Product
    from mcp_kernels.triton.matmul_reduce_launch import matmul_all_reduce as launch

    ys = [x.new_empty(x.shape[0], weights[0].shape[0]) for x in xs]

    def body(peers: Peers) -> None:
        launch(Product(xs[peers.rank], weights[peers.rank], None), ys[peers.rank], peers)

    return lambda: ranks.run(body)


def one_rank(bench: Bench, sizes: SpeedSizes) -> Iterator[Measurement]:
    """The fused kernel alone: what flags and staging cost beside cuBLAS."""
    for size in sizes.cubes:
        ranks = VirtualRanks.on(bench.device, Layout(1, sizes.num_rows, sizes.slot_bytes))
        (x,), (weight,) = _inputs(bench, 1, size, size), _inputs(bench, 1, size, size)
        bodies = {
            "ours": _fused(ranks, [x], [weight]),
            "cuBLAS": functools.partial(torch.mm, x, weight.t()),
        }
        rates = bench.rates(bodies, 2 * size**3 / 1e12)
        name = f"fused matmul_all_reduce W=1, {size} cubed"
        goals = {"cuBLAS": 0.85}
        peak = peak_tflops(bench.device)
        ours = ours_of(rates, "ours")
        yield Measurement(name, "TFLOP/s", ours, rates, peak=peak, goals=goals)


def several_ranks(bench: Bench, sizes: SpeedSizes) -> Iterator[Measurement]:
    """Virtual ranks beside cuBLAS for each rank and one sum."""
    for world in sizes.worlds:
        ranks = VirtualRanks.on(bench.device, Layout(world, sizes.num_rows, sizes.slot_bytes))
        for rows in sizes.small_rows:
            xs = _inputs(bench, world, rows, sizes.inner)
            weights = _inputs(bench, world, sizes.features, sizes.inner)

            def apart(xs: list[Tensor] = xs, weights: list[Tensor] = weights) -> Tensor:
                parts = [torch.mm(x, w.t()) for x, w in zip(xs, weights, strict=True)]
                return torch.stack(parts).sum(0)

            bodies: dict[str, Body] = {"ours": _fused(ranks, xs, weights), "cuBLAS and sum": apart}
            rates = bench.rates(bodies, 2 * world * rows * sizes.features * sizes.inner / 1e12)
            name = f"fused matmul_all_reduce, {world} virtual ranks, {rows} rows"
            ours = ours_of(rates, "ours")
            yield Measurement(name, "TFLOP/s", ours, rates, goals={"cuBLAS and sum": 1.15})


def reduction(bench: Bench, sizes: SpeedSizes) -> Iterator[Measurement]:
    """The CUDA all-reduce of virtual ranks, by bytes moved, beside torch.sum and a copy."""
    if not hasattr(torch.ops.mcp_kernels, "symmetric_all_reduce") or bench.device.type != "cuda":
        return
    for world in sizes.worlds:
        ranks = VirtualRanks.on(bench.device, Layout(world, CUDA_ROWS, sizes.slot_bytes))
        xs = _inputs(bench, world, sizes.reduced)
        stacked = torch.stack(xs)

        def body(peers: Peers, xs: list[Tensor] = xs) -> None:
            cuda_all_reduce.launch(xs[peers.rank], peers, cuda_all_reduce.ONE_SHOT)

        num_bytes = 2 * sizes.reduced
        # Each rank copies its x into its slot, reads all slots, and writes its result.
        ours = bench.rates(
            {"ours": functools.partial(ranks.run, body)}, world * (world + 3) * num_bytes / 1e9
        )
        sums = bench.rates({"torch.sum": lambda s=stacked: s.sum(0)}, (world + 1) * num_bytes / 1e9)
        peak = copy_gbps(bench, num_bytes)
        name = f"all_reduce one-shot, {world} virtual ranks, {sizes.reduced} elements"
        goals = {"torch.sum": 1.8}
        yield Measurement(name, "GB/s", ours_of(ours, "ours"), sums, peak=peak, goals=goals)


def overhead(bench: Bench, sizes: SpeedSizes) -> Iterator[Measurement]:
    """The public op without a group beside F.linear: one row, where a call costs most."""
    (x,) = _inputs(bench, 1, 1, sizes.inner)
    (weight,) = _inputs(bench, 1, sizes.features, sizes.inner)
    bodies: dict[str, Body] = {
        "ours": functools.partial(matmul_all_reduce, x, weight),
        "F.linear": functools.partial(linear, x, weight),
    }
    rates = bench.rates(bodies, 2 * weight.numel() / 1e9)
    ours = ours_of(rates, "ours")
    yield Measurement("matmul_all_reduce without a group, 1 row", "GB/s", ours, rates)


def measure(bench: Bench, sizes: SpeedSizes | None = None) -> Iterator[Measurement]:
    """All of the section."""
    sizes = sizes or SpeedSizes()
    yield from one_rank(bench, sizes)
    yield from several_ranks(bench, sizes)
    yield from reduction(bench, sizes)
    yield from overhead(bench, sizes)
