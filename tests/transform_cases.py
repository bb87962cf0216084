"""Every public op and layer as a function of one tensor, beside the same in plain PyTorch.

``call(x, *rest)`` is what a transform is put on: x is differentiated and mapped, the rest is
constant, and mapped where ``maps`` says so (what an op writes to). What an op writes to is part of
the result, so that a write that got lost shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import embedding, linear, silu

import mcp_kernels as m
from mcp_kernels import nn
from mcp_kernels.ops.compressed_all_reduce import ErrorState

BLOCK = 8  # of the codecs: more than one block at every length here
CODECS = ("fp8", "int8", "int4")


@dataclass(frozen=True)
class Case:
    make: Callable[[int], tuple[Tensor, ...]]
    """x and the rest for a length, the same values each time."""
    call: Callable[..., Tensor]
    exact: Callable[..., Tensor] | None = None
    """In plain PyTorch; None where no gradient flows."""
    maps: tuple[bool, ...] = ()
    """Which of the rest are mapped with x."""
    length: int = 3


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``[..., S, H, D]``, row i seeing keys up to ``i + Sk - Sq``."""
    group = q.shape[-2] // k.shape[-2]
    k, v = (t.repeat_interleave(group, dim=-2) for t in (k, v))
    s = torch.einsum("...ihd,...jhd->...hij", q, k) / math.sqrt(q.shape[-1])
    if causal:
        rows, keys = s.shape[-2:]
        visible = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        s = s.masked_fill(~visible, -math.inf)
    return torch.einsum("...hij,...jhd->...ihd", s.softmax(-1), v), s.logsumexp(-1)


def of_one(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, and k and v of half the heads, all of them functions of x."""
    return x, x[..., :1, :].sin(), x[..., :1, :].cos()


def packed(x: Tensor) -> Tensor:
    return torch.stack([x, x.sin(), x.cos()], dim=-3)


def packed_kv(x: Tensor) -> Tensor:
    return torch.stack(of_one(x)[1:], dim=-3)


def dense(x: Tensor) -> Tensor:
    return attend(*of_one(x))[0]


def dense_packed(x: Tensor) -> Tensor:
    return attend(x, x.sin(), x.cos())[0]


def sdpa(x: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in of_one(x))
    return m.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def make_dense(n: int) -> tuple[Tensor, ...]:
    return (draw(2, n, 2, 4),)


def make_varlen(n: int) -> tuple[Tensor, ...]:
    """Three sequences, one of them empty, and two rows of slack."""
    return draw(2 * n + 3, 2, 4), torch.tensor([0, n, n, 2 * n + 1])


def varlen_of(qkv: Callable[[Tensor], tuple[Tensor, ...]]) -> Callable[[Tensor, Tensor], Tensor]:
    def exact(x: Tensor, ends: Tensor) -> Tensor:
        q, k, v = qkv(x)
        bounds = ends.tolist()
        parts = [attend(*(t[a:b] for t in (q, k, v)))[0] for a, b in pairwise(bounds) if b > a]
        return torch.cat([*parts, torch.zeros_like(q[bounds[-1] :])])

    return exact


def varlen(x: Tensor, ends: Tensor) -> Tensor:
    longest = x.shape[0]
    return m.flash_attn_varlen_func(*of_one(x), ends, ends, longest, longest, causal=True)


def varlen_qkv(x: Tensor, ends: Tensor) -> Tensor:
    return m.flash_attn_varlen_qkvpacked_func(packed(x), ends, x.shape[0], causal=True)


def varlen_kv(x: Tensor, ends: Tensor) -> Tensor:
    lengths = (x.shape[0], x.shape[0])
    return m.flash_attn_varlen_kvpacked_func(x, packed_kv(x), ends, ends, *lengths, causal=True)


def make_cache(n: int) -> tuple[Tensor, ...]:
    caches = (draw(2, n + 5, 1, 4) for _ in range(2))
    return draw(2, 2, 2, 4), *caches, torch.tensor([n, 1]), torch.tensor([1, 0])


def cached(x: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, entries: Tensor) -> Tensor:
    out = m.flash_attn_with_kvcache(
        *(x, keys, values, *of_one(x)[1:]),
        cache_seqlens=lengths,
        cache_batch_idx=entries,
        causal=True,
    )
    return torch.cat([t.flatten() for t in (out, keys, values)])


def merged(x: Tensor) -> Tensor:
    q, k, v = of_one(x)
    halves = [attend(q, t, u, causal=False) for t, u in ((k, v), (2 * k, v.sin()))]
    out, lse = m.merge_attention(*map(list, zip(*halves, strict=True)))
    return out * lse.transpose(1, 2)[..., None]


def merged_exact(x: Tensor) -> Tensor:
    q, k, v = of_one(x)
    keys, values = torch.cat([k, 2 * k], 1), torch.cat([v, v.sin()], 1)
    out, lse = attend(q, keys, values, causal=False)
    return out * lse.transpose(1, 2)[..., None]


def make_rows(n: int) -> tuple[Tensor, ...]:
    return draw(n, 6), draw(6)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def added_norm(x: Tensor, weight: Tensor) -> Tensor:
    y, total = m.add_rms_norm(x, x.sin(), weight)
    return y * total


def added_norm_exact(x: Tensor, weight: Tensor) -> Tensor:
    return norm(x + x.sin(), weight) * (x + x.sin())


def make_turns(n: int) -> tuple[Tensor, ...]:
    angles = draw(n, 2)
    return draw(2, n, 2, 4), angles.cos(), angles.sin()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat(m.rotary(x, x.sin(), cos, sin), dim=2)


def turned_exact(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = torch.cat([x, x.sin()], dim=2).chunk(2, dim=-1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat([first * c - second * s, second * c + first * s], dim=-1)


def make_linear(n: int) -> tuple[Tensor, ...]:
    return draw(2, n, 4), draw(5, 4), draw(5)


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return linear(x, weight * x.sum(), bias)


def parallel(op: Callable[..., Any]) -> Callable[..., Tensor]:
    return lambda x, weight, bias: op(x, weight * x.sum(), bias)


def alone(op: Callable[..., Tensor], **kwargs: Any) -> Case:
    """A collective of one rank."""
    return Case(
        lambda n: (draw(2, n, 4),), lambda x: op(x.sin(), **kwargs).clone(), lambda x: x.sin()
    )


def make_floats(n: int) -> tuple[Tensor, ...]:
    return (draw(n, 16, dtype=torch.float32),)


def flat(*parts: Tensor) -> Tensor:
    return torch.cat([part.flatten().float() for part in parts])


def make_errors(n: int) -> tuple[Tensor, ...]:
    return *make_floats(n), draw(n * 16, dtype=torch.float32) / 8


def quantized(codec: str) -> Case:
    op = getattr(m, f"{codec}_quantize")
    return Case(make_floats, lambda x: flat(*op(x, BLOCK)))


def compressed(codec: str) -> Case:
    op = getattr(m, f"{codec}_compress")
    return Case(make_errors, lambda x, e: flat(*op(x, e, BLOCK), e), maps=(True,))


def make_codes(bits: int) -> Callable[[int], tuple[Tensor, ...]]:
    """Scales of ``2 n`` blocks, codes of two ranks, and a chunk's error."""

    def make(n: int) -> tuple[Tensor, ...]:
        scales = draw(2, 2 * n, dtype=torch.float32).abs()
        codes = torch.arange(2 * 2 * n * bits, dtype=torch.uint8).view(2, -1) % 120
        return scales, codes, draw(2 * n * BLOCK, dtype=torch.float32)

    return make


def decompressed(codec: str, bits: int) -> Case:
    op = getattr(m, f"{codec}_decompress")

    def call(scales: Tensor, codes: Tensor, error: Tensor) -> Tensor:
        return op(codes[0], scales[0], error.numel(), BLOCK)

    return Case(make_codes(bits), call)


def reduced(codec: str, bits: int) -> Case:
    op = getattr(m, f"{codec}_reduce")

    def call(scales: Tensor, codes: Tensor, error: Tensor) -> Tensor:
        return flat(*op(codes, scales, error, block_size=BLOCK), error)

    return Case(make_codes(bits), call, maps=(False, True))


def make_momentum(n: int) -> tuple[Tensor, ...]:
    signs = torch.arange(2 * n, dtype=torch.uint8)
    return *make_errors(n), signs, draw(2 * n, dtype=torch.float32).abs()


def momentum(x: Tensor, error: Tensor, bits: Tensor, scales: Tensor) -> Tensor:
    args = ([x], bits, scales, error)
    return flat(*m.onebit_compress_momentum(*args, beta1=0.5, block_size=BLOCK), error)


def adam(x: Tensor, denominator: Tensor, bits: Tensor, scales: Tensor) -> Tensor:
    args = ([x], denominator.abs() + 1, bits, scales)
    rates = {"lr": 0.5, "step_size": 0.25, "weight_decays": [0.125]}
    m.onebit_adam_update(*args, **rates, block_size=BLOCK)
    return x


def summed(x: Tensor, worker: Tensor, server: Tensor) -> Tensor:
    return flat(m.onebit_all_reduce(x, worker, server, block_size=BLOCK), worker, server)


def summed_int8(x: Tensor, worker: Tensor, server: Tensor) -> Tensor:
    state = ErrorState(worker, server)
    return flat(m.compressed_all_reduce(x, state, None, "int8", block_size=BLOCK), worker, server)


def make_sum(n: int) -> tuple[Tensor, ...]:
    x, error = make_errors(n)
    return x, error, error / 2


def layer_case(layer: Any) -> Case:
    """A linear layer as a function of its input and its weight."""

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional_call(layer, {"weight": weight * x.sum(), "bias": bias}, (x,))

    return Case(make_linear, call, affine)


def make_tokens(n: int) -> tuple[Tensor, ...]:
    return draw(n, 4), torch.arange(2 * n) % 5


def embedded(layer: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, tokens: functional_call(layer, {"weight": x[:5]}, (tokens,))


def cases() -> dict[str, Case]:
    """By public name; made anew, for layers hold parameters."""
    found = {
        "flash_attn_func": Case(
            make_dense, lambda x: m.flash_attn_func(*of_one(x), causal=True), dense
        ),
        "flash_attn_qkvpacked_func": Case(
            make_dense, lambda x: m.flash_attn_qkvpacked_func(packed(x), causal=True), dense_packed
        ),
        "flash_attn_kvpacked_func": Case(
            make_dense, lambda x: m.flash_attn_kvpacked_func(x, packed_kv(x), causal=True), dense
        ),
        "scaled_dot_product_attention": Case(make_dense, sdpa, dense),
        "flash_attn_varlen_func": Case(make_varlen, varlen, varlen_of(of_one)),
        "flash_attn_varlen_qkvpacked_func": Case(
            make_varlen, varlen_qkv, varlen_of(lambda x: packed(x).unbind(-3))
        ),
        "flash_attn_varlen_kvpacked_func": Case(make_varlen, varlen_kv, varlen_of(of_one)),
        "flash_attn_with_kvcache": Case(make_cache, cached, maps=(True, True, False, False)),
        "merge_attention": Case(make_dense, merged, merged_exact),
        "rms_norm": Case(make_rows, lambda x, w: m.rms_norm(x, w), norm),
        "add_rms_norm": Case(make_rows, added_norm, added_norm_exact),
        "swiglu": Case(
            make_rows, lambda x, w: m.swiglu(x, x.sin() * w), lambda x, w: silu(x) * x.sin() * w
        ),
        "rotary": Case(make_turns, turned, turned_exact),
        "all_reduce": alone(m.all_reduce),
        "reduce_scatter": alone(m.reduce_scatter, scatter_dim=1),
        "all_gather": alone(m.all_gather, gather_dim=1),
        "copy_to_group": alone(m.copy_to_group),
        "matmul_all_reduce": Case(make_linear, parallel(m.matmul_all_reduce), affine),
        "matmul_reduce_scatter": Case(make_linear, parallel(m.matmul_reduce_scatter), affine),
        "all_gather_matmul": Case(make_linear, parallel(m.all_gather_matmul), affine),
        "onebit_compress": compressed("onebit"),
        "onebit_decompress": decompressed("onebit", 1),
        "onebit_reduce": reduced("onebit", 1),
        "onebit_compress_momentum": Case(make_momentum, momentum, maps=(True, False, False)),
        "onebit_adam_update": Case(make_momentum, adam, maps=(False, False, False)),
        "onebit_all_reduce": Case(make_sum, summed, maps=(True, True)),
        "compressed_all_reduce": Case(make_sum, summed_int8, maps=(True, True)),
        "ColumnParallelLinear": layer_case(nn.ColumnParallelLinear(4, 5, dtype=torch.float64)),
        "RowParallelLinear": layer_case(nn.RowParallelLinear(4, 5, dtype=torch.float64)),
        "SplitLinear": layer_case(nn.SplitLinear(4, 5, dtype=torch.float64)),
        "VocabParallelEmbedding": Case(
            make_tokens,
            embedded(nn.VocabParallelEmbedding(5, 4, dtype=torch.float64)),
            lambda x, tokens: embedding(tokens, x[:5]),
            length=6,
        ),
    }
    attention = nn.FlashAttention(causal=True)
    found["FlashAttention"] = Case(make_dense, lambda x: attention(*of_one(x)), dense)
    for codec in CODECS:
        bits = 4 if codec == "int4" else 8
        found[f"{codec}_quantize"] = quantized(codec)
        found[f"{codec}_compress"] = compressed(codec)
        found[f"{codec}_decompress"] = decompressed(codec, bits)
        found[f"{codec}_reduce"] = reduced(codec, bits)
    return found
