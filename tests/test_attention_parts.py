"""The backward of attention over a part of the keys, given the lse and delta of all of them.

What ring attention runs block by block: gradients of the parts add up to those of the whole.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import mcp_kernels
from mcp_kernels.ops.attention_check import make_options

B, SQ, SK, H, N, D, E = 2, 37, 83, 4, 2, 16, 24
CUT = 29  # keys of the first part
EPS = {torch.float64: 2**-52, torch.float32: 2**-23, torch.bfloat16: 2**-7}


def make(dtype):
    generator = torch.Generator().manual_seed(5)
    shapes = [(B, SQ, H, D), (B, SK, N, D), (B, SK, N, E), (B, SQ, H, E)]
    q, k, v, dout = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return [t.to(dtype) for t in (q, k, v, dout)]


def exact(q, k, v, dout):
    """out, lse and gradients in float64, from plain operations, of the same rounded inputs."""
    q, k, v = (t.double().requires_grad_() for t in (q, k, v))
    wide_k, wide_v = (t.repeat_interleave(H // N, 2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, wide_k) * D**-0.5
    out = torch.einsum("bhij,bjhe->bihe", scores.softmax(-1), wide_v)
    grads = torch.autograd.grad(out, (q, k, v), dout.double())
    return out.detach(), scores.logsumexp(-1).detach(), grads


def options_of():
    return make_options(
        "test",
        D,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        causal_align="bottom_right",
    )


def part_backward(dout, q, k, v, out, lse, delta, *, varlen):
    """(dq, dk, dv) of one part of the keys."""
    ops = torch.ops.mcp_kernels
    if not varlen:
        terms = (None, None, None, None, False, *options_of())
        return ops.flash_attn_bwd(dout, None, q, k, v, out, lse, *terms, delta)[:3]
    bounds = [torch.arange(B + 1) * length for length in (q.shape[1], k.shape[1])]
    flat = [t.flatten(0, 1) for t in (dout, q, k, v, out)]
    by_head = [t.transpose(0, 1).flatten(1, 2) for t in (lse, delta)]
    grads = ops.flash_attn_varlen_bwd(
        flat[0], None, *flat[1:], by_head[0], *bounds, None, None, None, *options_of(), by_head[1]
    )
    return [g.view(t.shape) for g, t in zip(grads, (q, k, v), strict=False)]


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize("reference", [False, True], ids=["compiled", "reference"])
@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_parts_add_up_to_the_whole(dtype, reference, varlen):
    q, k, v, dout = make(dtype)
    want_out, want_lse, wanted = exact(q, k, v, dout)
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    out, lse = want_out.to(dtype), want_lse.to(sums)
    delta = (dout.double() * want_out).sum(-1).transpose(1, 2).to(sums)
    with mcp_kernels.reference_only() if reference else nullcontext():
        parts = [
            part_backward(dout, q, k[:, keys], v[:, keys], out, lse, delta, varlen=varlen)
            for keys in (slice(CUT), slice(CUT, None))
        ]
    (dq_1, dk_1, dv_1), (dq_2, dk_2, dv_2) = parts
    got = dq_1.double() + dq_2.double(), torch.cat([dk_1, dk_2], 1), torch.cat([dv_1, dv_2], 1)
    for grad, want in zip(got, wanted, strict=True):
        # Each of the products that make a gradient rounds its inputs to dtype and sums at most SK
        # or (H / N) SQ terms; errors of terms are independent, so their root of sum of squares
        # bounds the whole in the Frobenius norm: four roundings in a row (q, P, dS, the result).
        error = (grad.double() - want).norm() / want.norm()
        assert error <= 4 * EPS[dtype], error


def test_delta_of_a_part_alone_is_not_enough():
    """The bound above sees what it is there for: delta summed over the part's own keys is wrong."""
    q, k, v, dout = make(torch.float64)
    out, lse, wanted = exact(q, k, v, dout)
    terms = (None, None, None, None, False, *options_of())
    with mcp_kernels.reference_only():
        dq = sum(
            torch.ops.mcp_kernels.flash_attn_bwd(
                dout, None, q, k[:, keys], v[:, keys], out, lse, *terms
            )[0]
            for keys in (slice(CUT), slice(CUT, None))
        )
    assert (dq - wanted[0]).norm() / wanted[0].norm() > 0.01


def test_given_delta_wins_over_dlse_and_out():
    q, k, v, dout = make(torch.float32)
    out, lse, _ = exact(q, k, v, dout)
    delta = (dout.double() * out).sum(-1).transpose(1, 2).float()
    terms = (None, None, None, None, False, *options_of(), delta)
    lse = lse.float()
    first = torch.ops.mcp_kernels.flash_attn_bwd(dout, None, q, k, v, out.float(), lse, *terms)
    second = torch.ops.mcp_kernels.flash_attn_bwd(
        dout, torch.randn_like(lse), q, k, v, torch.randn_like(dout), lse, *terms
    )
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_a_part_has_no_second_derivative(varlen):
    q, k, v, dout = make(torch.float64)
    out, lse, _ = exact(q, k, v, dout)
    q.requires_grad_()
    delta = torch.zeros_like(lse)
    dq = part_backward(dout, q, k, v, out, lse, delta, varlen=varlen)[0]
    with pytest.raises(RuntimeError, match="delta must be None to be differentiated again"):
        dq.sum().backward()


def test_delta_of_another_size_is_refused():
    q, k, v, dout = make(torch.float32)
    out, lse, _ = exact(q, k, v, dout)
    terms = (None, None, None, None, False, *options_of(), torch.zeros(3))
    with pytest.raises(RuntimeError, match="delta"):
        torch.ops.mcp_kernels.flash_attn_bwd(dout, None, q, k, v, out.float(), lse.float(), *terms)
