"""The compiled attention bodies beside torch's scaled_dot_product_attention, in CPU time.

Each case names its goal. CPU time of the process, ours and the peer in turn, since other processes
may hold the cores; what is reported is peer over ours, by the minimum and by the median.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from mcp_kernels import flash_attn_func, flash_attn_varlen_func

Run = Callable[[], Any]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
# Work of one timed round: long enough that the clock's tick and the call's first misses vanish.
ROUND_FLOPS = 2e9


@dataclass(frozen=True)
class Prefill:
    """Causal or full attention, sizes B, H, N, S, D; goals as multiples of torch's speed."""

    sizes: tuple[int, int, int, int, int]
    dtype: str
    forward_goal: float
    backward_goal: float
    causal: bool = True

    def __str__(self) -> str:
        batch, heads, kv_heads, length, dim = self.sizes
        shape = f"B{batch}-H{heads}-N{kv_heads}-S{length}-D{dim}"
        return f"{self.dtype}-{shape}-{'causal' if self.causal else 'full'}"


PREFILLS = [
    Prefill((1, 8, 8, 2048, 64), "bf16", 2.2, 1.5),
    Prefill((1, 2, 2, 4096, 128), "bf16", 2.5, 1.5),
    Prefill((1, 2, 2, 4096, 128), "bf16", 1.0, 1.0, causal=False),
    Prefill((1, 8, 8, 2048, 64), "fp32", 1.2, 1.1),
    Prefill((1, 2, 2, 4096, 128), "fp32", 1.2, 1.1),
    Prefill((1, 8, 2, 2048, 64), "fp32", 1.2, 1.1),
    Prefill((1, 8, 8, 2048, 64), "fp16", 1.2, 1.1),
    Prefill((4, 8, 8, 128, 64), "fp32", 1.5, 1.5),
    Prefill((4, 8, 8, 128, 64), "bf16", 1.5, 1.5),
    Prefill((8, 8, 4, 128, 16), "fp32", 1.5, 1.5),
    Prefill((4, 6, 6, 256, 64), "fp32", 1.5, 1.5),
]


def draw(*shapes: Sequence[int], dtype: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator).to(DTYPES[dtype]).requires_grad_()
        for shape in shapes
    ]


def clock(run: Run) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


@pytest.fixture
def compare_cpu(benchmark):
    """``compare_cpu(ours, peer, flops, goal)``: ratios of CPU time and GFLOP/s of ours."""

    def run(ours: Run, peer: Run, flops: float, goal: float, rounds: int = 7) -> None:
        repeats = max(1, round(ROUND_FLOPS / flops))
        own_times: list[float] = []
        peer_times: list[float] = []

        def many(call: Run) -> Run:
            return lambda: [call() for _ in range(repeats)]

        def time_ours() -> None:
            own_times.append(clock(many(ours)))

        benchmark.pedantic(
            time_ours,
            setup=lambda: peer_times.append(clock(many(peer))),
            rounds=rounds,
            warmup_rounds=1,
        )
        if benchmark.disabled:
            return
        own, other = own_times[1:], peer_times[1:]
        ways = {"min": min, "median": statistics.median}
        info = benchmark.extra_info
        info["times_faster_than_torch"] = {
            name: float(f"{way(other) / way(own):.3g}") for name, way in ways.items()
        }
        info["goal"] = dict.fromkeys(ways, goal)
        info["gflop_per_s"] = {
            name: float(f"{flops * repeats / way(own) / 1e9:.3g}") for name, way in ways.items()
        }

    return run


def assert_alike(ours: Tensor, peer: Tensor) -> None:
    """A number is worth nothing when the result is wrong."""
    scale = float(peer.detach().float().abs().max())
    eps = torch.finfo(ours.dtype).eps
    # Torch's 16-bit gradients are sums in 16 bits: a few roundings of the largest.
    torch.testing.assert_close(ours, peer, rtol=0, atol=max(16 * eps, 1e-5) * scale)


def prefill_runs(case: Prefill) -> tuple[list[Tensor], Run, Run, float]:
    """(q, k, v; ours; torch's; forward flops) for tensors ``[B, S, H, D]``."""
    batch, heads, kv_heads, length, dim = case.sizes
    kv_shape = (batch, length, kv_heads, dim)
    leaves = draw((batch, length, heads, dim), kv_shape, kv_shape, dtype=case.dtype)
    q, k, v = leaves

    def ours() -> Tensor:
        return flash_attn_func(q, k, v, causal=case.causal)

    def peer() -> Tensor:
        q_t, k_t, v_t = (t.transpose(1, 2) for t in leaves)
        out = scaled_dot_product_attention(
            q_t, k_t, v_t, is_causal=case.causal, enable_gqa=heads != kv_heads
        )
        return out.transpose(1, 2)

    flops = 4.0 * batch * heads * length * length * dim / (2 if case.causal else 1)
    return leaves, ours, peer, flops


@pytest.mark.parametrize("case", PREFILLS, ids=str)
@pytest.mark.benchmark(group="flash_attention forward")
def bench_forward(case, compare_cpu):
    _, ours, peer, flops = prefill_runs(case)
    with torch.no_grad():
        assert_alike(ours(), peer())
        compare_cpu(ours, peer, flops, case.forward_goal)


@pytest.mark.parametrize("case", PREFILLS, ids=str)
@pytest.mark.benchmark(group="flash_attention backward")
def bench_backward(case, compare_cpu):
    leaves, ours, peer, flops = prefill_runs(case)
    out, peer_out = ours(), peer()
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)

    def grads(of: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(of, leaves, dout, retain_graph=True)

    for got, wanted in zip(grads(out), grads(peer_out), strict=True):
        assert_alike(got, wanted)
    compare_cpu(lambda: grads(out), lambda: grads(peer_out), 2.5 * flops, case.backward_goal)


def with_backward(call: Run, leaves: Sequence[Tensor]) -> Run:
    """``call`` and the gradients of its sum."""
    return lambda: torch.autograd.grad(call().sum(), leaves)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("backward", "goal"), [(False, 8.0), (True, 5.0)], ids=["fwd", "fwd_bwd"])
@pytest.mark.benchmark(group="flash_attention window")
def bench_window(dtype, backward, goal, compare_cpu):
    """256 keys to the left of each of 4096 rows, against torch with a mask."""
    length, left = 4096, 256
    leaves = draw(*[(1, length, 2, 64)] * 3, dtype=dtype)
    row, key = torch.arange(length)[:, None], torch.arange(length)
    mask = (key <= row) & (key >= row - left)

    def ours() -> Tensor:
        q, k, v = leaves
        return flash_attn_func(q, k, v, causal=True, window_size=(left, 0))

    def peer() -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in leaves)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    assert_alike(ours(), peer())
    flops = 4.0 * 2 * 64 * int(mask.sum())
    if backward:
        compare_cpu(with_backward(ours, leaves), with_backward(peer, leaves), 3.5 * flops, goal)
    else:
        with torch.no_grad():
            compare_cpu(ours, peer, flops, goal)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own compiler
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.benchmark(group="flash_attention window beside compiled FlexAttention")
def bench_window_beside_flex(dtype, compare_cpu):
    """The same window, forward; "torch" is FlexAttention, compiled, with a block mask.

    Compiling takes a minute or more. FlexAttention has no backward on CPU and refuses even inputs
    that require a gradient, so both run on inputs that do not.
    """
    length, left = 4096, 256
    leaves = [t.detach() for t in draw(*[(1, length, 2, 64)] * 3, dtype=dtype)]

    def is_visible(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key <= row) & (key >= row - left)

    mask = create_block_mask(is_visible, None, None, length, length, device="cpu")
    compiled = torch.compile(flex_attention)

    def ours() -> Tensor:
        q, k, v = leaves
        return flash_attn_func(q, k, v, causal=True, window_size=(left, 0))

    def peer() -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in leaves)
        return compiled(q, k, v, block_mask=mask).transpose(1, 2)

    assert_alike(ours(), peer())
    compare_cpu(ours, peer, 4.0 * 2 * 64 * left * length, 2.0)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "goal"),
    [("bf16", 32, 8, 20.0), ("fp32", 32, 8, 1.8), ("fp32", 32, 32, 1.8)],
)
@pytest.mark.benchmark(group="flash_attention decode")
def bench_decode(dtype, heads, kv_heads, goal, layout, compare_cpu):
    """One row against 4096 keys of 128; both read the cache as it lies in memory."""
    q, k, v = (
        t.detach() for t in draw((1, 1, heads, 128), *[(1, 4096, kv_heads, 128)] * 2, dtype=dtype)
    )
    if layout == "bhsd":
        k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))

    def peer() -> Tensor:
        q_t, k_t, v_t = (t.transpose(1, 2) for t in (q, k, v))
        return scaled_dot_product_attention(q_t, k_t, v_t, enable_gqa=True).transpose(1, 2)

    def ours() -> Tensor:
        return flash_attn_func(q, k, v)

    assert_alike(ours(), peer())
    compare_cpu(ours, peer, 4.0 * heads * 128 * 4096, goal)


@pytest.mark.benchmark(group="flash_attention varlen")
def bench_varlen(compare_cpu):
    """16 sequences of random length, forward and backward, against torch padded to the longest."""
    lengths = torch.randint(16, 1024, (16,), generator=torch.Generator().manual_seed(5))
    longest, heads, dim = int(lengths.max()), 4, 64
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    leaves = draw(*[(int(lengths.sum()), heads, dim)] * 3, dtype="bf16")
    is_key = torch.arange(longest) < lengths[:, None]
    mask = is_key[:, None, None, :] & torch.ones(longest, longest, dtype=torch.bool).tril()

    def ours() -> Tensor:
        q, k, v = leaves
        return flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, causal=True)

    def peer() -> Tensor:
        padded = []
        for tensor in leaves:
            full = tensor.new_zeros(16, longest, heads, dim)
            full[is_key] = tensor
            padded.append(full.transpose(1, 2))
        q, k, v = padded
        return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)[is_key]

    assert_alike(ours(), peer())
    flops = 3.5 * 2.0 * heads * dim * float(lengths.square().sum())
    compare_cpu(with_backward(ours, leaves), with_backward(peer, leaves), flops, 3.0, rounds=3)
