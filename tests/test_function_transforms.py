"""torch.func and forward mode: the right derivative, or words instead of a silent zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

from mcp_kernels import (
    add_rms_norm,
    all_reduce,
    flash_attn_func,
    flash_attn_varlen_func,
    rms_norm,
    rotary,
    swiglu,
)

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
