"""Attention over sequences laid end to end: each as if alone, slack rows untouched."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from mcp_kernels import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from mcp_kernels.ops.attention_mask import dropout_keep

# (lengths of q, lengths of k, slack rows): empty on either side, both, and no sequence at all.
LENGTHS = [
    ([5, 3, 7], [5, 3, 7], 0),
    ([4, 0, 6, 2], [3, 5, 0, 9], 3),
    ([0, 0], [0, 2], 2),
    ([], [], 4),
    ([1], [150], 0),
    ([150, 140], [150, 20], 1),
]
KWARGS = [{}, {"causal": True}, {"window_size": (2, 1), "softcap": 1.0}]


def _ends(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def _draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kwargs", KWARGS, ids=str)
def test_equals_separate_sequences(
    lengths: tuple[list[int], list[int], int], kwargs: dict[str, Any], poisoned_memory: None
) -> None:
    q_lengths, k_lengths, slack = lengths
    q_ends, k_ends = _ends(q_lengths), _ends(k_lengths, torch.int64)
    q = _draw(sum(q_lengths) + slack, 4, 5)
    k, v = _draw(sum(k_lengths) + slack, 2, 5), _draw(sum(k_lengths) + slack, 2, 3)
    sink, slopes = _draw(4), torch.rand(len(q_lengths), 4)
    leaves = [q, k, v, sink]
    max_q, max_k = max([0, *q_lengths]), max([0, *k_lengths])
    out, lse = flash_attn_varlen_func(
        q, k, v, q_ends, k_ends, max_q, max_k, **kwargs, alibi_slopes=slopes, sink=sink,
        return_lse=True,
    )  # fmt: skip
    expected, expected_lse = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    for b, (rows, keys) in enumerate(
        zip(pairwise(q_ends.tolist()), pairwise(k_ends.tolist()), strict=True)
    ):
        own_q, own_k, own_v = q[slice(*rows)], k[slice(*keys)], v[slice(*keys)]
        own_out, own_lse = flash_attn_func(
            own_q[None], own_k[None], own_v[None], **kwargs, alibi_slopes=slopes[b : b + 1],
            sink=sink, return_lse=True,
        )  # fmt: skip
        expected = torch.slice_scatter(expected, own_out[0], 0, *rows)
        expected_lse = torch.slice_scatter(expected_lse, own_lse[0], 1, *rows)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-13, atol=1e-14)
    assert (out[q_ends[-1] :] == 0).all()

    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    used = sum(q_lengths)

    def loss(out: Tensor, lse: Tensor) -> Tensor:
        return (out * dout).sum() + (lse * dlse)[:, :used].sum()

    got = torch.autograd.grad(loss(out, lse), leaves)
    unused = 0 * sum(t.sum() for t in leaves)  # a leaf that no sequence uses has gradient 0
    wanted = torch.autograd.grad(loss(expected, expected_lse) + unused, leaves)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)
    assert (got[0][used:] == 0).all()
    assert (got[1][sum(k_lengths) :] == 0).all()


def test_packed_forms() -> None:
    qkv, ends = _draw(9, 3, 2, 4), _ends([4, 5])
    q, k, v = qkv.unbind(1)
    out = flash_attn_varlen_func(q, k, v, ends, ends, 5, 5, causal=True)
    assert torch.equal(flash_attn_varlen_qkvpacked_func(qkv, ends, 5, causal=True), out)
    kv = qkv[:, 1:]
    packed = flash_attn_varlen_kvpacked_func(q, kv, ends, ends, 5, 5, causal=True)
    assert torch.equal(packed, out)


def test_slack_that_holds_nan_stays_away() -> None:
    q, k, v = (_draw(8, 2, 4).detach() for _ in range(3))
    for t in (q, k, v):
        t[6:] = math.nan
    for t in (q, k, v):
        t.requires_grad_()
    out = flash_attn_varlen_func(q, k, v, _ends([2, 4]), _ends([2, 4]), 4, 4, causal=True)
    assert out.isfinite().all()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(g.isfinite().all() and (g[6:] == 0).all() for g in grads)


def test_pages() -> None:
    lengths, page_size = [5, 0, 8], 3
    q, q_ends = _draw(6, 2, 4), _ends([2, 1, 3])
    k, v = _draw(13, 2, 4), _draw(13, 2, 4)
    k_ends = _ends(lengths)
    expected = flash_attn_varlen_func(q, k, v, q_ends, k_ends, 3, 8, causal=True)
    table = torch.tensor([[4, 0, -1], [-1, 99, -1], [2, 6, 1]])  # entries past the end: anything
    paged_k, paged_v = (torch.full((7, page_size, 2, 4), math.nan).double() for _ in range(2))
    for b, start in ((0, 0), (2, 5)):
        for j in range(lengths[b]):
            page = int(table[b, j // page_size])
            paged_k[page, j % page_size], paged_v[page, j % page_size] = k[start + j], v[start + j]
    out = flash_attn_varlen_func(
        q, paged_k.detach(), paged_v.detach(), q_ends, k_ends, 3, 8, causal=True, block_table=table
    )
    assert torch.equal(out, expected)


def test_dropout_counts_sequences_and_places() -> None:
    """Sequence b, row i, key j drop as entry (b, h, i, j) of a padded batch does."""
    q, k, v = _draw(7, 2, 4), _draw(7, 2, 4), _draw(7, 2, 4)
    ends, rng = _ends([3, 4]), torch.tensor([21, 0])
    options = (0.5, -1, -1, False, 0.0, 0.5)
    out, _ = torch.ops.mcp_kernels.flash_attn_varlen(q, k, v, ends, ends, None, None, rng, *options)
    heads = torch.arange(2)
    for b, (start, stop) in enumerate(pairwise(ends.tolist())):
        at = torch.arange(stop - start)
        keep = dropout_keep(rng, 0.5, torch.tensor([b]), heads, at, at)[0]
        own_q, own_k, own_v = (t[start:stop] for t in (q, k, v))
        p = torch.softmax(torch.einsum("ihd,jhd->hij", own_q, own_k) * 0.5, -1) * keep / 0.5
        torch.testing.assert_close(out[start:stop], torch.einsum("hij,jhe->ihe", p, own_v))


def test_second_gradient_and_opcheck() -> None:
    q, k, v, sink = _draw(5, 2, 2), _draw(6, 1, 2), _draw(6, 1, 2), _draw(2)
    q_ends, k_ends = _ends([2, 0, 2]), _ends([3, 1, 1])

    def run(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k, v, q_ends, k_ends, 2, 3, causal=True, sink=sink)

    assert torch.autograd.gradcheck(run, (q, k, v, sink))
    assert torch.autograd.gradgradcheck(run, (q, k, v, sink))
    options = (0.7, 1, 0, False, 1.0, 0.0)
    args = (q, k, v, q_ends, k_ends, None, sink, None, *options)
    torch.library.opcheck(torch.ops.mcp_kernels.flash_attn_varlen.default, args)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"cu_seqlens_q": torch.tensor([1, 4])}, "cu_seqlens_q must start at 0 and never fall"),
        ({"cu_seqlens_q": torch.tensor([0, 3, 2])}, "cu_seqlens_q must start at 0 and never fall"),
        ({"cu_seqlens_k": torch.tensor([0, 9])}, "cu_seqlens_k must end within the 4 rows given"),
        ({"cu_seqlens_k": torch.tensor([0, 1, 4])}, "cu_seqlens_q and cu_seqlens_k must be of one"),
        ({"cu_seqlens_k": torch.zeros(2, 2).int()}, r"cu_seqlens_k must be \[B \+ 1\]"),
        ({"q": torch.zeros(1, 4, 2, 4)}, r"q must be \[total, H, D\]"),
    ],
)
def test_errors(change: dict[str, Any], match: str) -> None:
    arguments: dict[str, Any] = {name: torch.zeros(4, 2, 4) for name in "qkv"}
    arguments |= {name: torch.tensor([0, 4]) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    arguments |= {"max_seqlen_q": 4, "max_seqlen_k": 4} | change
    with pytest.raises(ValueError, match="flash_attn_varlen_func: " + match):
        flash_attn_varlen_func(**arguments)
