"""torch.func and forward mode: the right derivative, or words instead of a silent zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp, vjp, vmap

from mcp_kernels import (
    add_rms_norm,
    all_reduce,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    onebit_adam_update,
    onebit_compress,
    rms_norm,
    rotary,
    swiglu,
)
from mcp_kernels.testing import assert_same_bits

_generator = torch.Generator().manual_seed(0)
X = torch.randn(2, 3, 2, 4, dtype=torch.float64, generator=_generator)
WEIGHT = torch.randn(4, dtype=torch.float64, generator=_generator)
ANGLES = torch.randn(3, 2, dtype=torch.float64, generator=_generator)
ENDS = torch.tensor([0, 2, 3])


def _norm_and_sum(x: Tensor) -> Tensor:
    y, total = add_rms_norm(x, 2 * x, WEIGHT)
    return y * total


TWICE: dict[str, Callable[[Tensor], Tensor]] = {
    "flash_attn": lambda x: flash_attn_func(x, x, x, causal=True),
    "rms_norm": lambda x: rms_norm(x, WEIGHT),
    "add_rms_norm": _norm_and_sum,
    "swiglu": lambda x: swiglu(x, 2 * x),
    "rotary": lambda x: rotary(x, x, ANGLES.cos(), ANGLES.sin())[0],
}
NO_TANGENTS = TWICE | {
    "flash_attn_varlen": lambda x: flash_attn_varlen_func(x[0], x[0], x[0], ENDS, ENDS, 2, 2),
    "flash_attn_kvcache": lambda x: flash_attn_with_kvcache(x, X.clone(), X.clone()),
    "all_reduce": lambda x: all_reduce(x),
}


@pytest.mark.parametrize("name", TWICE)
def test_gradient_of_a_gradient_is_that_of_autograd(name: str) -> None:
    call = TWICE[name]

    def penalty(x: Tensor) -> Tensor:
        return grad(lambda y: call(y).square().sum())(x).square().sum()

    leaf = X.clone().requires_grad_()
    [first] = torch.autograd.grad(call(leaf).square().sum(), leaf, create_graph=True)
    [wanted] = torch.autograd.grad(first.square().sum(), leaf)
    # The same operations in float64, in an order of their own at most.
    torch.testing.assert_close(grad(penalty)(X), wanted, rtol=1e-12, atol=1e-12)
    mapped = vmap(grad(lambda x: penalty(x[None])))(X)
    torch.testing.assert_close(mapped, wanted, rtol=1e-12, atol=1e-12)


# torch's own formulas of forward mode, when it first needs them.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", NO_TANGENTS)
@pytest.mark.parametrize("with_grad", [True, False])
def test_a_tangent_is_refused_not_lost(name: str, with_grad: bool) -> None:
    words = f"{name}: inputs must have no tangent"
    with (
        forward_ad.dual_level(),
        torch.set_grad_enabled(with_grad),
        pytest.raises(NotImplementedError, match=words),
    ):
        NO_TANGENTS[name](forward_ad.make_dual(X, X))
    with pytest.raises(NotImplementedError, match=words):
        jvp(NO_TANGENTS[name], (X,), (X,))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_forward_mode_of_something_else_may_be_on() -> None:
    with forward_ad.dual_level():
        assert torch.equal(rms_norm(X, WEIGHT), rms_norm(X.clone(), WEIGHT))


ENDS_OF_FIVE = torch.tensor([0, 3, 5])


def _varlen_with_all(x: Tensor, sink: Tensor) -> Tensor:
    """Two heads over one, a window, a softcap, ALiBi, a sink and a row of slack."""
    key = x[..., :1, :]
    return flash_attn_varlen_func(
        *(x, key.sin(), key.cos(), ENDS_OF_FIVE, ENDS_OF_FIVE, 3, 3),
        causal=True,
        window_size=(1, 0),
        softcap=2.0,
        alibi_slopes=torch.tensor([0.5, 0.25]),
        sink=sink,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_sequences_have_autograds_bits(dtype: torch.dtype) -> None:
    """The same ops on the same values: what holds of autograd's gradients holds of these."""
    x, sink = X.flatten(0, 1).to(dtype), X[0, 0, :, 0].to(dtype)

    def loss(x: Tensor, sink: Tensor) -> Tensor:
        return _varlen_with_all(x, sink).square().sum()

    leaves = [t.clone().requires_grad_() for t in (x, sink)]
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    for got, one in zip(grad(loss, (0, 1))(x, sink), wanted, strict=True):
        assert_same_bits(got, one)
    mapped = vmap(grad(loss, (0, 1)), (0, None))(torch.stack([x, x]), sink)
    for got, one in zip(mapped, wanted, strict=True):
        assert_same_bits(got, torch.stack([one, one]))


def test_second_gradients_of_sequences_with_everything() -> None:
    x, sink = X.flatten(0, 1), X[0, 0, :, 0]

    def slope(x: Tensor, sink: Tensor) -> Tensor:
        first = grad(lambda *args: _varlen_with_all(*args).square().sum(), (0, 1))(x, sink)
        return first[0].square().sum() + first[1].square().sum()

    leaves = [t.clone().requires_grad_() for t in (x, sink)]
    loss = _varlen_with_all(*leaves).square().sum()
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    wanted = torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), leaves)
    for got, one in zip(grad(slope, (0, 1))(x, sink), wanted, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-12, atol=1e-12)


def _cached(q: Tensor, keys: Tensor, values: Tensor, new: Tensor | None = None) -> Tensor:
    return flash_attn_with_kvcache(q, keys, values, new, new, cache_seqlens=1)


def _adam(p: Tensor, scales: Tensor) -> Tensor:
    bits = torch.zeros(1, dtype=torch.uint8)
    rates: dict[str, Any] = {"lr": 0.5, "step_size": 0.5, "weight_decays": [0.0]}
    onebit_adam_update([p], torch.ones(8), bits, scales, **rates, block_size=8)
    return p


EIGHT, SCALES = torch.ones(2, 8), torch.ones(2, 1)
TWO = torch.stack([X, X])
# Each with its words; under a map or inside of another gradient no tensor says what is wanted.
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "cached": (lambda: grad(lambda q: _cached(q, X, X).sum())(X), "has no backward"),
    "cached, mapped": (
        lambda: grad(lambda q: vmap(_cached)(q, TWO, TWO).sum())(TWO),
        "flash_attn_kvcache: q must not require grad",
    ),
    "cached, of a gradient": (
        lambda: grad(lambda w: grad(lambda q: _cached(w * q.detach(), X, X).sum())(X).sum())(X),
        "flash_attn_kvcache: q must not require grad",
    ),
    "one cache for all": (
        lambda: vmap(_cached, (0, None, None, 0))(TWO, X.clone(), X.clone(), TWO[:, :, :1]),
        "flash_attn_kvcache: k_cache must be mapped",
    ),
    "slopes, mapped": (
        lambda: grad(
            lambda s: vmap(lambda x, s: flash_attn_func(x, x, x, alibi_slopes=s))(TWO, s).sum()
        )(torch.ones(2, 2)),
        "flash_attn: alibi_slopes must not require grad",
    ),
    "angles": (
        lambda: grad(lambda c: rotary(X, X, c, c)[0].sum())(ANGLES),
        "rotary: cos and sin must not require grad",
    ),
    "ends of each sample": (
        lambda: vmap(lambda e: flash_attn_varlen_func(X[0], X[0], X[0], e, e, 2, 2))(
            torch.stack([ENDS, ENDS])
        ),
        "flash_attn_varlen_func: cu_seqlens_q must be the same for every sample",
    ),
    "no sample": (
        lambda: vmap(lambda x: flash_attn_func(x, x, x))(TWO[:0]),
        "flash_attn: the dimension that torch",
    ),
    "dropout": (
        lambda: vmap(lambda x: flash_attn_varlen_func(x, x, x, ENDS, ENDS, 2, 2, 0.5))(X),
        "flash_attn_varlen_func: dropout_p must be 0 under",
    ),
    "one error for all": (
        lambda: vmap(onebit_compress, (0, None))(EIGHT, EIGHT[0].clone()),
        "onebit_compress: error must be mapped",
    ),
    "an error of a graph": (
        lambda: grad(lambda e: vmap(onebit_compress)(EIGHT, e)[1].sum())(EIGHT.clone()),
        "onebit_compress: error must not require grad",
    ),
    "one parameter for all": (
        lambda: vmap(_adam, (None, 0))(EIGHT[0].clone(), SCALES),
        "onebit_adam_update: params must be mapped",
    ),
    "a parameter of a graph": (
        lambda: grad(lambda p: vmap(_adam)(p, SCALES).sum())(EIGHT.clone()),
        "onebit_adam_update: params must not require grad",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_said(name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises((ValueError, RuntimeError), match=words):
        call()


def test_samples_may_share_a_cache_that_nothing_is_written_to() -> None:
    got = vmap(_cached, (0, None, None))(TWO, X, X)
    assert torch.equal(got, torch.stack([_cached(q, X, X) for q in TWO]))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_of_sequences_under_a_map(randomness: str) -> None:
    def call(x: Tensor) -> Tensor:
        return flash_attn_varlen_func(x, x, x, ENDS, ENDS, 2, 2, 0.5)

    first, second = vmap(call, randomness=randomness)(torch.stack([X[0]] * 2))
    assert torch.equal(first, second) == (randomness == "same")


def test_a_map_over_gradients_takes_the_mask_of_the_forward() -> None:
    """It draws nothing, so it need not say how its samples differ."""
    pull = vjp(lambda x: flash_attn_func(x, x, x, dropout_p=0.5), X)[1]
    (wanted,), (got,) = pull(X), vmap(pull)(TWO)
    assert wanted.any()
    assert torch.equal(got, torch.stack([wanted, wanted]))
