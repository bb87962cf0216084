"""The numerical rule of attention over the sizes that break kernels, and proof that it can fail.

Exact means float64 formulas on the same rounded inputs. 16-bit results may be 1.5 times as far
from it as the exact result rounded once (relative Frobenius norm), gradients no farther than plain
torch in the same dtype and at most 2.5e-3 in bfloat16; float32 is held to 2e-6, about 30 unit
roundoffs for the two chained sums and the exponential, float64 to 1e-13.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mcp_kernels import flash_attn_func

HEAD_SIZES = [1, 32, 40, 59, 64, 80, 96, 111, 128, 192, 256]
LENGTHS = [(1, 1), (1, 239), (3, 799), (64, 63), (127, 512), (113, 203), (1024, 1023)]
HEADS = [(65, 5), (16, 4), (5, 1), (2, 2)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@dataclass
class Problem:
    """Inputs rounded to ``dtype`` and what must come out."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    causal: bool

    @property
    def inputs(self) -> list[Tensor]:
        return [self.q, self.k, self.v]


def make(rows, keys, heads, kv_heads, dim, dtype, causal, seed=0) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def normal(length: int, count: int) -> Tensor:
        return torch.randn(1, length, count, dim, generator=generator).to(dtype)

    q, k, v = normal(rows, heads), normal(keys, kv_heads), normal(keys, kv_heads)
    return Problem(q, k, v, normal(rows, heads), causal)


def plain(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Attention as one writes it down, in the dtype it is given."""
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    if causal:
        rows, keys = q.shape[1], k.shape[1]
        hidden = torch.ones(rows, keys, dtype=torch.bool).triu(1 + keys - rows)
        s = s.masked_fill(hidden, -math.inf)
    return torch.einsum("bhij,bjhd->bihd", s.softmax(-1).nan_to_num(0.0), v)


def results(function: Callable[..., Tensor], problem: Problem, *, wide: bool) -> list[Tensor]:
    """out, dq, dk, dv of ``function``; ``wide`` computes in float64."""
    inputs = [(t.double() if wide else t).detach().requires_grad_() for t in problem.inputs]
    out = function(*inputs, causal=problem.causal)
    dout = problem.dout.double() if wide else problem.dout
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def distance(a: Tensor, exact: Tensor) -> float:
    scale = exact.norm().item()
    return (a.double() - exact).norm().item() / scale if scale else a.double().norm().item()


def broken_rules(function: Callable[..., Tensor], problem: Problem) -> list[str]:
    """Each result of ``function`` that the rule rejects."""
    dtype = problem.q.dtype
    exact = results(plain, problem, wide=True)
    got = results(function, problem, wide=False)
    is_narrow = dtype in (torch.bfloat16, torch.float16)
    peers = results(plain, problem, wide=False) if is_narrow else exact
    broken = []
    for name, a, peer, want in zip(("out", "dq", "dk", "dv"), got, peers, exact, strict=True):
        assert a.dtype == dtype
        error = distance(a, want)
        if dtype == torch.float64:
            limit = 1e-13
        elif dtype == torch.float32:
            limit = 2e-6
        else:
            once = distance(want.to(dtype), want)
            limit = 1.5 * once
            if name != "out":
                # Where plain torch is exact by luck (a row of one key), one rounding is allowed.
                limit = max(limit, distance(peer, want))
                limit = min(limit, 2.5e-3) if dtype == torch.bfloat16 else limit
        # A gradient that is zero in exact arithmetic (one key, softmax of one) is noise.
        floor = torch.finfo(torch.float32 if is_narrow else dtype).eps * want.numel() ** 0.5
        if not (error <= limit or (a.double() - want).norm().item() <= 30 * floor):
            broken.append(f"{name}: {error:.2e} > {limit:.2e}")
    return broken


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", HEAD_SIZES)
def test_head_sizes_and_lengths(dim, causal, dtype):
    # Every head size meets every length in some dtype; float32 meets them all.
    for index, (rows, keys) in enumerate(LENGTHS):
        if dtype != torch.float32 and (index + HEAD_SIZES.index(dim)) % 3:
            continue
        problem = make(rows, keys, 2, 1, dim, dtype, causal, seed=index)
        assert not broken_rules(flash_attn_func, problem), (rows, keys)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_head_groups(heads, kv_heads, dtype):
    for causal in (False, True):
        problem = make(37, 51, heads, kv_heads, 24, dtype, causal)
        assert not broken_rules(flash_attn_func, problem)


BLOCK = 64


def blocked(q, k, v, *, causal, rescale=True, dropped_block=None, mask_shift=0, head_map="div"):
    """Online softmax over key blocks in float32, right unless told otherwise."""
    dtype = q.dtype
    q, k, v = q.float(), k.float(), v.float()
    heads, kv_heads = q.shape[2], k.shape[2]
    if head_map == "div":
        index = torch.arange(heads) // (heads // kv_heads)
    else:
        index = torch.arange(heads) % kv_heads
    k, v = k[:, :, index], v[:, :, index]
    rows, keys = q.shape[1], k.shape[1]
    top = torch.full((1, heads, rows, 1), -math.inf)
    total, out = torch.zeros(1, heads, rows, 1), torch.zeros(1, heads, rows, v.shape[3])
    for number, start in enumerate(range(0, keys, BLOCK)):
        if number == dropped_block:
            continue
        part = slice(start, start + BLOCK)
        s = torch.einsum("bihd,bjhd->bhij", q, k[:, part]) * q.shape[3] ** -0.5
        if causal:
            last = torch.arange(rows) + keys - rows + mask_shift
            hidden = torch.arange(start, start + s.shape[3]) > last[:, None]
            s = s.masked_fill(hidden, -math.inf)
        new_top = torch.maximum(top, s.detach().amax(-1, keepdim=True))
        safe = new_top.masked_fill(new_top == -math.inf, 0.0)
        factor = (top - safe).exp() if rescale else 1.0
        p = (s - safe).exp()
        total, top = total * factor + p.sum(-1, keepdim=True), new_top
        out = out * factor + torch.einsum("bhij,bjhd->bhid", p, v[:, part])
    return (out / total.clamp_min(1e-30)).transpose(1, 2).to(dtype)


PLANTED = {
    "tail mask off by one": {"mask_shift": 1},
    "tail mask short by one": {"mask_shift": -1},
    "lse not rescaled": {"rescale": False},
    "one block dropped": {"dropped_block": 1},
    "last block dropped": {"dropped_block": 2},
    "head map modulo": {"head_map": "mod"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_the_rule_passes_a_right_blocked_kernel(dtype):
    assert not broken_rules(blocked, make(150, 170, 6, 2, 16, dtype, True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("bug", PLANTED)
def test_the_rule_rejects_planted_bugs(bug, dtype):
    def kernel(q, k, v, *, causal):
        return blocked(q, k, v, causal=causal, **PLANTED[bug])

    broken = broken_rules(kernel, make(150, 170, 6, 2, 16, dtype, True))
    assert any(line.startswith("out") for line in broken), broken
    assert any(line.startswith("d") for line in broken), broken
