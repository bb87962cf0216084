"""Attention under torch.vmap: each sample as if it were alone."""

import contextlib

import pytest
import torch

import mcp_kernels
from mcp_kernels import flash_attn_func

N, B, SQ, SK, H, D = 3, 2, 5, 7, 4, 6


def make(*shape, seed=0):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed + len(shape)), dtype=torch.float64
    )


def qkv(lead=(N,)):
    return (
        make(*lead, B, SQ, H, D, seed=1),
        make(*lead, B, SK, 2, D, seed=2),
        make(*lead, B, SK, 2, D, seed=3),
    )


EXTRAS = {
    "plain": ({}, {}),
    "window": ({"window_size": (2, 1), "softcap": 3.0}, {}),
    "bias shared": ({"bias": make(1, 1, SQ, SK)}, {}),
    "bias a sample": ({}, {"bias": make(N, B, H, SQ, SK)}),
    "bias a sample, broadcast": ({}, {"bias": make(N, 1, 1, 1, SK)}),
    "slopes": ({"alibi_slopes": torch.rand(H)}, {}),
    "slopes a sample": ({}, {"alibi_slopes": torch.rand(N, B, H)}),
    "sink shared": ({"sink": make(H)}, {}),
    "sink a sample": ({}, {"sink": make(N, H)}),
}


@pytest.mark.parametrize("name", EXTRAS)
def test_forward(name):
    shared, mapped = EXTRAS[name]
    names = list(mapped)

    def call(q, k, v, *extra):
        return flash_attn_func(
            q, k, v, causal=True, return_lse=True, **shared, **dict(zip(names, extra, strict=True))
        )

    args = (*qkv(), *mapped.values())
    out, lse = torch.vmap(call)(*args)
    for i in range(N):
        want_out, want_lse = call(*(a[i] for a in args))
        torch.testing.assert_close(out[i], want_out, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(lse[i], want_lse, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("in_dims", [(1, None, 0), (None, 2, -1), (0, 0, None)])
def test_any_dimension_may_be_mapped(in_dims):
    args = [
        t if dim is None else t.movedim(0, dim)
        for t, dim in zip(
            (a if dim is not None else a[0] for a, dim in zip(qkv(), in_dims, strict=True)),
            in_dims,
            strict=True,
        )
    ]
    out = torch.vmap(flash_attn_func, in_dims=in_dims)(*args)
    for i in range(N):
        sample = [
            t if dim is None else t.select(dim, i) for t, dim in zip(args, in_dims, strict=True)
        ]
        torch.testing.assert_close(out[i], flash_attn_func(*sample), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", ["plain", "bias shared", "bias full", "sink shared", "slopes"])
def test_many_output_gradients_at_once(name):
    shared = {"bias full": {"bias": make(B, H, SQ, SK)}}.get(name) or EXTRAS[name][0]
    shared = {key: value.clone() for key, value in shared.items()}
    inputs = [t.requires_grad_() for t in qkv(())]
    inputs += [shared[key].requires_grad_() for key in ("bias", "sink") if key in shared]
    out = flash_attn_func(*inputs[:3], causal=True, **shared)
    douts = make(N, *out.shape, seed=9)
    together = torch.autograd.grad(out, inputs, douts, is_grads_batched=True, retain_graph=True)
    for i in range(N):
        alone = torch.autograd.grad(out, inputs, douts[i], retain_graph=True)
        for a, b in zip(together, alone, strict=True):
            torch.testing.assert_close(a[i], b, rtol=1e-12, atol=1e-12)


def test_dropout_must_say_how_samples_differ():
    args = qkv()

    def call(q, k, v):
        return flash_attn_func(q, k, v, dropout_p=0.5)

    with pytest.raises(ValueError, match="flash_attn_func: dropout_p must be 0 under"):
        torch.vmap(call)(*args)
    alike = [a[:1].expand(N, *a.shape[1:]) for a in args]
    same = torch.vmap(call, randomness="same")(*alike)
    assert torch.equal(same[0], same[1])
    different = torch.vmap(call, randomness="different")(*alike)
    assert not torch.equal(different[0], different[1])


def loss(q, k, v):
    return flash_attn_func(q, k, v, causal=True).square().sum()


def gradients_one_by_one(argnums):
    leaves = [[t[i].clone().requires_grad_() for t in qkv()] for i in range(N)]
    grads = [torch.autograd.grad(loss(*own), [own[n] for n in argnums]) for own in leaves]
    return [torch.stack(parts) for parts in zip(*grads, strict=True)]


def test_gradient_inside_the_map():
    """Gradients of each sample, as torch.func writes them, on compiled bodies and references."""
    for context in (contextlib.nullcontext, mcp_kernels.reference_only):
        with context():
            got = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*qkv())
        for grad, wanted in zip(got, gradients_one_by_one((0, 1, 2)), strict=True):
            torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=1e-12)
    twice = torch.vmap(torch.vmap(torch.func.grad(loss)))(*(t[:, :, None] for t in qkv()))
    torch.testing.assert_close(twice.squeeze(2), gradients_one_by_one((0,))[0])


@pytest.mark.parametrize("name", ["sink shared", "bias a sample"])
def test_gradient_inside_the_map_with_more_leaves(name):
    shared, mapped = EXTRAS[name]
    ((key, extra),) = (shared | mapped).items()
    in_dims = (0, 0, 0, None if shared else 0)

    def call(q, k, v, extra):
        return flash_attn_func(q, k, v, **{key: extra}).square().sum()

    got = torch.vmap(torch.func.grad(call, argnums=(0, 3)), in_dims=in_dims)(*qkv(), extra)
    for i in range(N):
        q, k, v = (t[i].clone().requires_grad_() for t in qkv())
        own = (extra if shared else extra[i]).clone().requires_grad_()
        wanted = torch.autograd.grad(call(q, k, v, own), (q, own))
        for grad, alone in zip(got, wanted, strict=True):
            torch.testing.assert_close(grad[i], alone, rtol=1e-12, atol=1e-12)


def test_second_gradients_and_jacobians():
    q, k, v = (t[0] for t in qkv())

    def steepness(q):
        return torch.func.grad(loss)(q, k, v).square().sum()

    leaf = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf, k, v), leaf, create_graph=True)
    (wanted,) = torch.autograd.grad(first.square().sum(), leaf)
    torch.testing.assert_close(torch.func.grad(steepness)(q), wanted)

    def out(q):
        return flash_attn_func(q, k, v, causal=True)

    by_torch = torch.autograd.functional.jacobian(out, q)
    torch.testing.assert_close(torch.func.jacrev(out)(q), by_torch)
