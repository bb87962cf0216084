"""The tensor-parallel kernels on the GPU at hand, by virtual ranks: what must hold.

Results against float64 on the same rounded inputs, equal bits on all ranks, a thousand replays of
one CUDA graph, and a rank that does not come.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mcp_kernels.gpu_check.report import Check
from mcp_kernels.gpu_check.virtual_ranks import SECOND_NS, VirtualRanks
from mcp_kernels.symmetric import all_reduce as cuda_all_reduce
from mcp_kernels.symmetric.layout import CUDA_ROWS, Layout, read_error
from mcp_kernels.symmetric.peers import Peers
from mcp_kernels.symmetric.scatter_gather import launch_gather, launch_scatter
from mcp_kernels.testing import sum_error_bound


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is checked; a CPU takes one rank and small sizes."""

    worlds: tuple[int, ...] = (1, 2, 3, 4)
    shapes: tuple[tuple[int, int, int], ...] = ((1, 512, 1000), (333, 200, 777), (1111, 512, 1500))
    """(M, N, K of a rank)."""
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    slot_bytes: int = 2 << 20
    num_rows: int = 513
    replays: int = 1000


@dataclass(frozen=True, slots=True)
class Inputs:
    """Every rank's ``x [M, K]`` and ``weight [N, K]``, and one bias."""

    xs: list[Tensor]
    weights: list[Tensor]
    bias: Tensor

    @staticmethod
    def draw(
        device: torch.device, dtype: torch.dtype, world: int, shape: tuple[int, int, int]
    ) -> Inputs:
        """The same numbers on every machine."""
        generator = torch.Generator().manual_seed(world)
        rows, features, inner = shape

        def draw(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator).to(dtype).to(device)

        xs = [draw(rows, inner) for _ in range(world)]
        return Inputs(xs, [draw(features, inner) for _ in range(world)], draw(features))

    def exact(self) -> tuple[Tensor, Tensor]:
        """The summed product in float64, and the most that it may be off."""
        dtype = self.xs[0].dtype
        pairs = list(zip(self.xs, self.weights, strict=True))
        exact = self.bias.double() + sum(x.double() @ w.double().t() for x, w in pairs)
        size = self.bias.double().abs() + sum(
            x.double().abs() @ w.double().abs().t() for x, w in pairs
        )
        terms = len(pairs) * (self.xs[0].shape[1] + 1) + 1
        # Each rank's product is rounded once, their sum once more.
        bound = sum_error_bound(exact, size, terms, dtype) + 0.5 * torch.finfo(dtype).eps * size
        return exact, bound


def _judge(name: str, ys: list[Tensor], exact: Tensor, bound: Tensor, errors: list[int]) -> Check:
    if any(errors):
        return Check(name, False, f"a rank was missed: {[read_error(e) for e in errors]}")
    same = all(torch.equal(ys[0], y) for y in ys[1:])
    worst = float(((ys[0].double() - exact).abs() / bound).max()) if exact.numel() else 0.0
    detail = f"{worst:.2f} of the bound, {'equal bits' if same else 'BITS DIFFER'}"
    return Check(name, same and worst <= 1, detail)


def _fused(ranks: VirtualRanks, inputs: Inputs, form: int) -> list[Tensor]:
    from mcp_kernels.triton.matmul_reduce_launch import Product, matmul_all_reduce

    rows, features = inputs.xs[0].shape[0], inputs.bias.shape[0]
    ys = [x.new_empty(rows, features) for x in inputs.xs]

    def body(peers: Peers) -> None:
        product = Product(inputs.xs[peers.rank], inputs.weights[peers.rank], inputs.bias)
        matmul_all_reduce(product, ys[peers.rank], peers, form=form)

    ranks.run(body)
    return ys


def check_all_reduce(device: torch.device, sizes: Sizes) -> Iterator[Check]:
    """matmul_all_reduce: every form, world, type and shape; each channel several times."""
    for world in sizes.worlds:
        ranks = VirtualRanks.on(device, Layout(world, sizes.num_rows, sizes.slot_bytes))
        for form, form_name in enumerate(("one-shot", "two-shot")):
            for dtype in sizes.dtypes:
                for shape in sizes.shapes:
                    inputs = Inputs.draw(device, dtype, world, shape)
                    name = f"matmul_all_reduce {form_name} W={world} {dtype} {shape}"
                    ys = _fused(ranks, inputs, form)
                    yield _judge(name, ys, *inputs.exact(), ranks.missed())


def check_scatter_and_gather(device: torch.device, sizes: Sizes) -> Iterator[Check]:
    """matmul_reduce_scatter and all_gather_matmul by their bodies."""
    from mcp_kernels.triton.all_gather_matmul import gather
    from mcp_kernels.triton.matmul_reduce_scatter import scatter

    for world in sizes.worlds:
        layout = Layout(world, sizes.num_rows, sizes.slot_bytes)
        reducing, gathering = VirtualRanks.on(device, layout), VirtualRanks.on(device, layout)
        for shape in sizes.shapes:
            inputs = Inputs.draw(device, sizes.dtypes[0], world, shape)
            parts: list[Tensor] = [inputs.bias] * world

            def reduce(peers: Peers, inputs: Inputs = inputs, parts: list[Tensor] = parts) -> None:
                x, weight = inputs.xs[peers.rank], inputs.weights[peers.rank]
                parts[peers.rank] = scatter(x, weight, inputs.bias, peers, 0)

            reducing.run(reduce)
            errors = reducing.missed()
            name = f"matmul_reduce_scatter W={world} {shape}"
            yield _judge(name, [torch.cat(parts)], *inputs.exact(), errors)

            whole = Inputs([inputs.xs[0]], [inputs.weights[0]], inputs.bias)
            cut = inputs.xs[0].split(-(-shape[0] // world))
            cut = [*cut, *[inputs.xs[0][:0]] * (world - len(cut))]

            def join(
                peers: Peers, whole: Inputs = whole, cut: list[Tensor] = cut,
                parts: list[Tensor] = parts, size: int = shape[0],
            ) -> None:  # fmt: skip
                args = ([whole.weights[0]], [whole.bias], peers, 0, size, True)
                (parts[peers.rank],), _ = gather(cut[peers.rank], *args)

            gathering.run(join)
            errors = gathering.missed()
            name = f"all_gather_matmul W={world} {shape}"
            yield _judge(name, parts, *whole.exact(), errors)


def check_cuda_all_reduce(device: torch.device, sizes: Sizes) -> Iterator[Check]:
    """The CUDA all-reduce, where it was built."""
    if not hasattr(torch.ops.mcp_kernels, "symmetric_all_reduce") or device.type != "cuda":
        return
    for world in sizes.worlds:
        ranks = VirtualRanks.on(device, Layout(world, CUDA_ROWS, sizes.slot_bytes))
        for form in (cuda_all_reduce.ONE_SHOT, cuda_all_reduce.TWO_SHOT):
            for dtype in (*sizes.dtypes, torch.float64):
                for numel in (1, 1003, 3 * sizes.slot_bytes // dtype.itemsize + 5):
                    generator = torch.Generator().manual_seed(numel)
                    xs = [torch.randn(numel, generator=generator).to(device, dtype)
                          for _ in range(world)]  # fmt: skip
                    ys = list(xs)

                    def body(
                        peers: Peers, xs: list[Tensor] = xs, ys: list[Tensor] = ys, form: int = form
                    ) -> None:
                        ys[peers.rank] = cuda_all_reduce.launch(xs[peers.rank], peers, form)

                    ranks.run(body)
                    errors = ranks.missed()
                    stacked = torch.stack(xs).double()
                    exact, size = stacked.sum(0), stacked.abs().sum(0)
                    bound = sum_error_bound(exact, size, world, dtype) + 1e-300
                    name = f"all_reduce form {form} W={world} {dtype} {numel}"
                    yield _judge(name, ys, exact, bound, errors)


def check_cuda_scatter_and_gather(device: torch.device, sizes: Sizes) -> Iterator[Check]:
    """The CUDA reduce-scatter and all-gather, where they were built, by turns on one channel."""
    if not hasattr(torch.ops.mcp_kernels, "symmetric_all_gather") or device.type != "cuda":
        return
    for world in sizes.worlds:
        ranks = VirtualRanks.on(device, Layout(world, CUDA_ROWS, sizes.slot_bytes))
        for dtype in (*sizes.dtypes, torch.float64):
            for numel in (1, 1003, sizes.slot_bytes // dtype.itemsize + 5):
                generator = torch.Generator().manual_seed(numel)
                xs = [torch.randn(world, numel, generator=generator).to(device, dtype)
                      for _ in range(world)]  # fmt: skip
                sums, joined = list(xs), list(xs)

                def body(
                    peers: Peers, xs: list[Tensor] = xs, sums: list[Tensor] = sums,
                    joined: list[Tensor] = joined,
                ) -> None:  # fmt: skip
                    sums[peers.rank] = launch_scatter(xs[peers.rank], peers)
                    joined[peers.rank] = launch_gather(xs[peers.rank], peers)

                ranks.run(body)
                errors = ranks.missed()
                stacked = torch.stack(xs)
                exact, size = stacked.double().sum(0), stacked.double().abs().sum(0)
                bound = sum_error_bound(exact, size, world, dtype) + 1e-300
                label = f"W={world} {dtype} {numel}"
                yield _judge(f"reduce_scatter {label}", [torch.stack(sums)], exact, bound, errors)
                same = all(torch.equal(rows, stacked) for rows in joined)
                yield Check(f"all_gather {label}", same and not any(errors), "equal bits" * same)


def check_backward(device: torch.device, sizes: Sizes) -> Iterator[Check]:
    """matmul_reduce_scatter's gradient for x by its body."""
    from mcp_kernels.triton.matmul_reduce_scatter import gradients

    for world in sizes.worlds:
        ranks = VirtualRanks.on(device, Layout(world, sizes.num_rows, sizes.slot_bytes))
        for shape in sizes.shapes:
            inputs = Inputs.draw(device, sizes.dtypes[0], 1, shape)
            dy, weight = inputs.xs[0], inputs.weights[0].t().contiguous()  # [M, N], [N, K]
            cut = dy.split(-(-shape[0] // world))
            cut = [*cut, *[dy[:0]] * (world - len(cut))]
            dxs: list[Tensor] = [dy] * world

            def body(
                peers: Peers, cut: list[Tensor] = cut, dxs: list[Tensor] = dxs,
                weight: Tensor = weight, size: int = shape[0],
            ) -> None:  # fmt: skip
                needs = [True, False, False]
                dxs[peers.rank], _, _ = gradients(
                    cut[peers.rank], None, weight, needs, peers, 0, size
                )

            ranks.run(body)
            errors = ranks.missed()
            whole = Inputs([dy], [inputs.weights[0]], torch.zeros_like(inputs.bias))
            name = f"matmul_reduce_scatter_backward W={world} {shape}"
            yield _judge(name, dxs, *whole.exact(), errors)


def check_missing_rank(device: torch.device, sizes: Sizes) -> Iterator[Check]:
    """A rank that does not come is named, the result is NaN, and the next call does not wait."""
    from mcp_kernels.triton.matmul_reduce_launch import TWO_SHOT, Product, matmul_all_reduce

    layout = Layout(2, sizes.num_rows, sizes.slot_bytes)
    ranks = VirtualRanks.on(device, layout, timeout_ns=SECOND_NS // 20)
    inputs = Inputs.draw(device, torch.float32, 2, (40, 64, 32))
    y = torch.zeros(40, 64, device=device)

    def body(peers: Peers) -> None:
        product = Product(inputs.xs[0], inputs.weights[0], None)
        matmul_all_reduce(product, y, peers, form=TWO_SHOT)

    ranks.run(body, ranks=[0])
    missed = read_error(ranks.missed()[0])
    is_named = missed is not None and (missed.rank, missed.epoch) == (1, 1)
    yield Check("a missing rank is named", is_named, str(missed))
    yield Check("its result is NaN", bool(y.isnan().any()), "poisoned")


def check_graph(device: torch.device, sizes: Sizes) -> Iterator[Check]:
    """One captured call replayed many times gives the same bits: epochs live on the device."""
    if device.type != "cuda":
        return
    for world in sizes.worlds:
        ranks = VirtualRanks.on(device, Layout(world, sizes.num_rows, sizes.slot_bytes))
        inputs = Inputs.draw(device, torch.bfloat16, world, sizes.shapes[-1])
        for form in range(2):
            first = _fused(ranks, inputs, form)
            call = functools.partial(_fused, ranks, inputs, form)
            detail = _replay(call, first, sizes.replays)
            errors = ranks.missed()
            is_right = detail == "equal bits" and not any(errors)
            yield Check(f"graph replay W={world} form {form} x{sizes.replays}", is_right, detail)


def _replay(call: Callable[[], list[Tensor]], first: list[Tensor], replays: int) -> str:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ys = call()
    differing = torch.zeros((), dtype=torch.int64, device=first[0].device)
    for _ in range(replays):
        for y in ys:
            y.zero_()
        graph.replay()
        for y, wanted in zip(ys, first, strict=True):
            differing += (y != wanted).sum()
    count = int(differing)
    return "equal bits" if count == 0 else f"{count} elements differ"


def check(device: torch.device, sizes: Sizes | None = None) -> Iterator[Check]:
    """All of the section."""
    sizes = sizes or Sizes()
    yield from check_all_reduce(device, sizes)
    yield from check_scatter_and_gather(device, sizes)
    yield from check_cuda_all_reduce(device, sizes)
    yield from check_cuda_scatter_and_gather(device, sizes)
    yield from check_backward(device, sizes)
    yield from check_missing_rank(device, sizes)
    yield from check_graph(device, sizes)
