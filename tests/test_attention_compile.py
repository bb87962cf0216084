"""Attention under ``torch.compile(fullgraph=True, dynamic=True)``: lengths share their graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from graphs import Graphs
from torch import Tensor

from mcp_kernels import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    scaled_dot_product_attention,
)

pytestmark = pytest.mark.slow


def _draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).requires_grad_()


def _dense(rows: int) -> list[Tensor]:
    """q, k, v; no two sizes that differ later are one now, else torch takes them for one."""
    sizes = ((rows, 4), (rows + 3, 2), (rows + 3, 2))
    return [_draw(2, n, heads, 8, seed=s) for s, (n, heads) in enumerate(sizes)]


def _sink_and_slopes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_func(
        q, k, v, window_size=(9, 2), softcap=3.0, sink=q[0, 0, :, 0], alibi_slopes=torch.ones(4)
    )


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


CALLS: dict[str, Callable[..., Tensor]] = {
    "causal": lambda q, k, v: flash_attn_func(q, k, v, causal=True),
    "window_softcap_sink_alibi": _sink_and_slopes,
    "sdpa": _sdpa,
}


@pytest.mark.parametrize("name", CALLS)
def test_lengths_share_a_graph(name: str) -> None:
    torch._dynamo.reset()
    graphs, call = Graphs(), CALLS[name]
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=graphs)
    for rows in (6, 17, 130, 47):
        leaves = _dense(rows)
        out, wanted = compiled(*leaves), call(*leaves)
        assert out.stride() == wanted.stride()
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(
            torch.autograd.grad(out.square().sum(), leaves),
            torch.autograd.grad(wanted.square().sum(), leaves),
        )
    assert graphs.count == 1


def test_sequences_of_every_length() -> None:
    torch._dynamo.reset()
    graphs = Graphs()

    def call(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int) -> Tensor:
        return flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, causal=True)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=graphs)
    for lengths in ([5, 4, 3], [30, 15, 7], [60, 70, 11], [9, 33, 20]):
        ends = torch.tensor([0, *lengths]).cumsum(0).int()
        leaves = [_draw(sum(lengths), heads, 8, seed=s) for s, heads in enumerate((4, 2, 2))]
        out, wanted = (f(*leaves, ends, max(lengths)) for f in (compiled, call))
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(
            torch.autograd.grad(out.square().sum(), leaves),
            torch.autograd.grad(wanted.square().sum(), leaves),
        )
    assert graphs.count == 1


def test_cached_steps_write_the_cache_in_place() -> None:
    torch._dynamo.reset()
    graphs = Graphs()

    def call(q: Tensor, caches: list[Tensor], k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        return flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, causal=True)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=graphs)
    caches = [_draw(2, 40, 2, 8, seed=s).detach() for s in (5, 6)]
    own = [cache.clone() for cache in caches]
    lengths = torch.tensor([3, 11], dtype=torch.int32)
    for rows in (3, 5, 7, 4):
        q, k, v = (_draw(2, rows, h, 8, seed=h).detach() for h in (4, 2, 2))
        out, wanted = compiled(q, own, k, v, lengths), call(q, caches, k, v, lengths)
        torch.testing.assert_close(out, wanted)
        assert all(torch.equal(a, b) for a, b in zip(own, caches, strict=True))
        lengths = lengths + rows
    assert graphs.count == 1


@pytest.fixture(scope="module")
def inductor() -> None:
    """Before a test begins: its first graph marks the environment and the path of the process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own modules, when inductor imports them
        torch.compile(lambda x: x + 1)(torch.ones(2))


@pytest.mark.usefixtures("inductor")
def test_inductor_forward_and_backward() -> None:
    """With the strides that the compiler was told of, and operations fused around the op."""
    torch._dynamo.reset()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.silu(flash_attn_func(q * 0.5, k, v, causal=True)) + q

    leaves = _dense(33)
    out, wanted = torch.compile(call, fullgraph=True, dynamic=True)(*leaves), call(*leaves)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), leaves),
        torch.autograd.grad(wanted.square().sum(), leaves),
    )
