"""Attention on the GPU against the reference in float64 on the same rounded inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import mcp_kernels
from mcp_kernels.gpu_check.report import Check
from mcp_kernels.ops.attention_functions import flash_attn_func
from mcp_kernels.ops.attention_kvcache import flash_attn_with_kvcache
from mcp_kernels.ops.attention_varlen_functions import flash_attn_varlen_func

# (B, Sq, Sk, H, N, D, E): tiles that do not fit, GQA, one row, odd head dims up to the widest.
SHAPES = (
    (2, 321, 321, 4, 2, 64, 64),
    (1, 200, 1023, 8, 1, 128, 128),
    (1, 799, 130, 2, 2, 59, 40),
    (2, 1, 1111, 8, 2, 128, 128),
    (1, 130, 200, 2, 1, 256, 256),
)
KWARGS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": True, "causal_align": "top_left", "softcap": 5.0},
    {"window_size": (100, 20)},
)


def _draw(generator: torch.Generator, device: torch.device, dtype: torch.dtype, *shape: int) -> Any:
    drawn = torch.randn(shape, generator=generator).to(dtype)
    return drawn.to(device).requires_grad_()


def _relative(actual: Tensor, wanted: Tensor) -> float:
    """Error of ``actual`` over the error of rounding ``wanted`` once to its dtype, in the norm."""
    if not bool(actual.isfinite().all()):
        return float("inf")
    error = float((actual.double() - wanted).norm())
    once = float((wanted.to(actual.dtype).double() - wanted).norm())
    if actual.dtype == torch.float32:
        # Sums of float32 results: some hundred roundoffs, as tests hold the reference to.
        once = 100 * 2.0**-24 * float(wanted.norm())
    return error / max(once, 1e-6 * wanted.numel() ** 0.5 * torch.finfo(actual.dtype).eps)


def _compare(name: str, leaves: list[Tensor], kwargs: dict[str, Any]) -> Check:
    """Output, lse and all gradients of one call.

    P or dS, the result, and the output inside delta are rounded once each: sqrt(3).
    """
    allowed = 1.03 * 3**0.5
    q, k, v = leaves[:3]
    extras: dict[str, Any] = {"sink": leaves[3]} if len(leaves) > 3 else {}
    out, lse = flash_attn_func(q, k, v, **kwargs, **extras, return_lse=True)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    wide_q, wide_k, wide_v = wide[:3]
    extras = {"sink": wide[3]} if len(wide) > 3 else {}
    with mcp_kernels.reference_only():
        exact, exact_lse = flash_attn_func(
            wide_q, wide_k, wide_v, **kwargs, **extras, return_lse=True
        )
        exact_grads = torch.autograd.grad(exact, wide, dout.double())
    names = ("out", "dq", "dk", "dv", "dsink")
    pairs = zip((out, *grads), (exact, *exact_grads), strict=True)
    errors = {n: _relative(a.detach(), w.detach()) for n, (a, w) in zip(names, pairs, strict=False)}
    seen = exact_lse.isfinite()
    errors["lse"] = _relative(lse.detach()[seen], exact_lse.detach()[seen])
    worst = max(errors.values())
    detail = ", ".join(f"{n} {e:.2f}" for n, e in errors.items()) + " times one rounding"
    return Check(name, worst <= allowed, detail)


def check_grid(
    device: torch.device, shapes: tuple[tuple[int, ...], ...] = SHAPES
) -> Iterator[Check]:
    """Every shape with every option and type."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for sizes in shapes:
            batch, rows, keys, heads, kv_heads, dim, value_dim = sizes
            for kwargs in KWARGS:
                leaves = [
                    _draw(generator, device, dtype, batch, rows, heads, dim),
                    _draw(generator, device, dtype, batch, keys, kv_heads, dim),
                    _draw(generator, device, dtype, batch, keys, kv_heads, value_dim),
                    _draw(generator, device, torch.float32, heads),
                ]
                yield _compare(f"{dtype} {sizes} {kwargs}", leaves, kwargs)


def check_known_bugs(device: torch.device, scale: int = 1) -> Iterator[Check]:
    """Shapes on which other kernels gave NaN on Hopper.

    pytorch#196678: keys that end 64 past a multiple of 128, under a mask, with logits so negative
    that ``exp(0 - lse)`` of a padding key overflows in backward. cudnn-frontend#1072: one row.
    """
    generator = torch.Generator().manual_seed(1)
    for length in (192 // scale, 1088 // scale):
        leaves = [_draw(generator, device, torch.bfloat16, 2, length, 4, 128) for _ in range(3)]
        with torch.no_grad():
            leaves[0].abs_().mul_(4)
            leaves[1].abs_().mul_(-4)
        mask = torch.ones(2, 1, 1, length, dtype=torch.bool, device=device)
        mask[1, ..., -length // 4 :] = False
        yield _compare(f"pytorch#196678 S={length}", leaves, {"bias": mask})
        yield _compare(f"pytorch#196678 S={length} causal", leaves, {"causal": True})
    q = _draw(generator, device, torch.bfloat16, 8, 1, 16, 128)
    k, v = (_draw(generator, device, torch.bfloat16, 8, 1024 // scale, 16, 128) for _ in range(2))
    yield _compare("cudnn-frontend#1072 Sq=1", [q, k, v], {})
    yield _compare("cudnn-frontend#1072 Sq=1 causal", [q, k, v], {"causal": True})


def check_properties(device: torch.device) -> Iterator[Check]:
    """Equal to itself by other ways: again, sequence by sequence, from a cache, dropout on CPU."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (_draw(generator, device, torch.float16, 2, 150, 4, 64) for _ in range(3))
    out = flash_attn_func(q, k, v, causal=True)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    again = torch.autograd.grad(flash_attn_func(q, k, v, causal=True).sum(), (q, k, v))
    same = all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
    yield Check("backward twice", same, "equal bits" if same else "bits differ")

    ends = torch.tensor([0, 150, 300], dtype=torch.int32, device=device)
    flat_q, flat_k, flat_v = (t.detach().flatten(0, 1) for t in (q, k, v))
    packed = flash_attn_varlen_func(flat_q, flat_k, flat_v, ends, ends, 150, 150, causal=True)
    error = float((packed - out.detach().view_as(packed)).abs().max())
    yield Check("varlen equals a batch", error <= 2**-9, f"largest difference {error:.2g}")

    lengths = torch.tensor([150, 150], dtype=torch.int32, device=device)
    with torch.no_grad():
        step = flash_attn_with_kvcache(q[:, -1:], k, v, cache_seqlens=lengths, causal=True)
    error = float((step - out.detach()[:, -1:]).abs().max())
    yield Check("cache equals the last row", error <= 2**-9, f"largest difference {error:.2g}")

    rng = torch.tensor([12345, 6], device=device)
    options = (0.125, -1, -1, False, 0.0, 0.5)
    zero, eye = torch.zeros_like(q), torch.eye(150, 64).half().to(device)
    args = (zero.detach(), k.detach(), eye[None, :, None].expand(2, 150, 4, 64))
    kept = torch.ops.mcp_kernels.flash_attn(*args, None, None, None, rng, *options)[0] != 0
    host = (t.cpu() for t in args)
    with mcp_kernels.reference_only():
        on_cpu = torch.ops.mcp_kernels.flash_attn(*host, None, None, None, rng.cpu(), *options)[0]
    same = torch.equal(kept.cpu(), on_cpu != 0)
    yield Check("dropout mask is the CPU's", same, "equal" if same else "masks differ")


def check(device: torch.device) -> Iterator[Check]:
    """All of the section."""
    yield from check_grid(device)
    yield from check_known_bugs(device)
    yield from check_properties(device)
