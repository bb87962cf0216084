"""Speed of attention beside SDPA's back ends, FlexAttention and flash-attn, on the same inputs."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mcp_kernels.gpu_check.report import Measurement
from mcp_kernels.gpu_check.timing import Bench, copy_gbps, ours_of
from mcp_kernels.ops.attention_functions import flash_attn_func
from mcp_kernels.ops.attention_kvcache import flash_attn_with_kvcache

Body = Callable[[], object]

# Dense bfloat16 TFLOP/s of the datasheets.
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "H800": 989.0, "A100": 312.0, "B200": 2250.0}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the goals G1 to G7; tests on a CPU take small ones."""

    batch: int = 2
    heads: int = 16
    head_dim: int = 128
    rows: int = 8192
    windowed_rows: int = 16384
    window: int = 1024
    decode_batch: int = 8
    decode_heads: int = 32
    decode_kv_heads: int = 8
    decode_keys: int = 32768


def peak_tflops(device: torch.device) -> float | None:
    """The device's dense bfloat16 peak, where its name is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def _qkv(device: torch.device, sizes: Sizes, rows: int) -> list[Tensor]:
    """q, k, v ``[B, S, H, D]`` bfloat16."""
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (sizes.batch, rows, sizes.heads, sizes.head_dim)
    return [
        torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        .requires_grad_()
        for _ in range(3)
    ]  # fmt: skip


def _sdpa(backend: SDPBackend, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    with sdpa_kernel(backend):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return out.transpose(1, 2)


def _peers(causal: bool) -> dict[str, Callable[..., Tensor]]:
    peers = {
        "SDPA flash": functools.partial(_sdpa, SDPBackend.FLASH_ATTENTION, causal),
        "SDPA cuDNN": functools.partial(_sdpa, SDPBackend.CUDNN_ATTENTION, causal),
    }
    if importlib.util.find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_func as peer  # type: ignore[reportMissingImports]

        peers["flash-attn"] = functools.partial(peer, causal=causal)
    return peers


def _forward(function: Callable[..., Tensor], qkv: list[Tensor]) -> Body:
    def run() -> object:
        with torch.no_grad():
            return function(*qkv)

    return run


def _backward(function: Callable[..., Tensor], qkv: list[Tensor]) -> Body:
    """The gradients alone; the graph is made at the first call, so that a refusal is the peer's."""
    made: list[Tensor] = []

    def run() -> object:
        if not made:
            made.append(function(*qkv))
        out = made[0]
        return torch.autograd.grad(out, qkv, out.detach(), retain_graph=True)

    return run


def _step(function: Callable[..., Tensor], qkv: list[Tensor]) -> Body:
    def run() -> object:
        out = function(*qkv)
        return torch.autograd.grad(out, qkv, out.detach())

    return run


def _rate(
    bench: Bench, name: str, bodies: dict[str, Body], tflop: float, goals: dict[str, float]
) -> Measurement:
    rates = bench.rates(bodies, tflop)
    peak = peak_tflops(bench.device)
    return Measurement(name, "TFLOP/s", ours_of(rates, "ours"), rates, peak=peak, goals=goals)


def training_steps(bench: Bench, sizes: Sizes) -> Iterator[Measurement]:
    """G1 to G4: forward and backward, full and causal."""
    qkv = _qkv(bench.device, sizes, sizes.rows)
    full = 4 * sizes.batch * sizes.heads * sizes.rows**2 * sizes.head_dim / 1e12
    goals = {
        ("forward", False): {"ours": 450.0, "SDPA flash": 1.2},
        ("forward", True): {"ours": 400.0, "SDPA cuDNN": 0.75},
        ("backward", True): {"ours": 300.0, "SDPA flash": 1.1},
    }
    for causal in (False, True):
        flops = full / 2 if causal else full
        functions: dict[str, Callable[..., Tensor]] = {
            "ours": functools.partial(flash_attn_func, causal=causal),
            **_peers(causal),
        }
        kind = "causal" if causal else "full"
        for direction, make, factor in (("forward", _forward, 1.0), ("backward", _backward, 2.5)):
            bodies = {name: make(function, qkv) for name, function in functions.items()}
            yield _rate(
                bench,
                f"{direction} {kind}, {sizes.rows} rows",
                bodies,
                flops * factor,
                goals.get((direction, causal), {}),
            )
    bodies = {
        "ours": _backward(functools.partial(flash_attn_func, causal=True, deterministic=True), qkv),
        "ours, not asked to be": _backward(functools.partial(flash_attn_func, causal=True), qkv),
    }
    least = {"ours, not asked to be": 1 / 1.15}
    yield _rate(bench, "backward causal, deterministic", bodies, 2.5 * full / 2, least)


def windows(bench: Bench, sizes: Sizes) -> Iterator[Measurement]:
    """G5: a sliding window, forward and backward, beside FlexAttention compiled."""
    qkv = _qkv(bench.device, sizes, sizes.windowed_rows)
    tokens = sizes.batch * sizes.heads * sizes.windowed_rows
    tflop = 3.5 * 4 * tokens * sizes.window * sizes.head_dim / 1e12
    window = (sizes.window - 1, 0)
    bodies = {"ours": _step(functools.partial(flash_attn_func, window_size=window), qkv)}
    if bench.device.type == "cuda":
        bodies["FlexAttention"] = _step(_flex(sizes, bench.device), qkv)
    name = f"window {sizes.window} of {sizes.windowed_rows} rows, forward and backward"
    yield _rate(bench, name, bodies, tflop, {"FlexAttention": 1.0})


def _flex(sizes: Sizes, device: torch.device) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def sees(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key <= row) & (row - key < sizes.window)

    rows = sizes.windowed_rows
    mask = create_block_mask(sees, None, None, rows, rows, device=str(device))
    compiled: Any = torch.compile(flex_attention)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return compiled(q, k, v, block_mask=mask).transpose(1, 2)

    return run


def decode(bench: Bench, sizes: Sizes) -> Iterator[Measurement]:
    """G6: one row a sequence over a long cache; K and V are what has to be read."""
    device = bench.device
    kv = (sizes.decode_batch, sizes.decode_keys, sizes.decode_kv_heads, sizes.head_dim)
    k, v = (torch.randn(kv, device=device, dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(
        sizes.decode_batch, 1, sizes.decode_heads, sizes.head_dim,
        device=device, dtype=torch.bfloat16,
    )  # fmt: skip

    def peer() -> object:
        own_q, own_k, own_v = (t.transpose(1, 2) for t in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(
            own_q, own_k, own_v, enable_gqa=True
        )

    num_bytes = 2 * k.numel() * k.element_size()
    lengths = torch.full((sizes.decode_batch,), sizes.decode_keys, dtype=torch.int32, device=device)
    bodies: dict[str, Body] = {
        "ours": lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True),
        "SDPA": peer,
    }
    copy = copy_gbps(bench, num_bytes)
    rates = bench.rates(bodies, num_bytes / 1e9)
    name = f"decode, {sizes.decode_batch} sequences of {sizes.decode_keys} keys"
    ours = ours_of(rates, "ours")
    rates["device copy"] = copy
    yield Measurement(name, "GB/s", ours, rates, peak=copy, goals={"device copy": 0.7})


def extras(bench: Bench, sizes: Sizes) -> Iterator[Measurement]:
    """G7: what sink, softcap and ALiBi cost on top of plain causal attention."""
    qkv = _qkv(bench.device, sizes, sizes.rows)
    tflop = 2 * sizes.batch * sizes.heads * sizes.rows**2 * sizes.head_dim / 1e12
    per_head = torch.rand(sizes.heads, device=bench.device)
    plain = _forward(functools.partial(flash_attn_func, causal=True), qkv)
    options: dict[str, dict[str, Any]] = {
        "sink": {"sink": per_head},
        "softcap": {"softcap": 30.0},
        "ALiBi": {"alibi_slopes": per_head},
    }
    for name, option in options.items():
        own = _forward(functools.partial(flash_attn_func, causal=True, **option), qkv)
        bodies = {"ours": own, "ours without": plain}
        yield _rate(bench, f"forward causal with {name}", bodies, tflop, {"ours without": 1 / 1.1})


def measure(bench: Bench, sizes: Sizes | None = None) -> Iterator[Measurement]:
    """All of the section."""
    sizes = sizes or Sizes()
    for part in (training_steps, windows, decode, extras):
        yield from part(bench, sizes)
