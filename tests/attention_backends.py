"""Every body of the attention ops behind one name: reference, each instruction set, Triton.

Public functions are called as they are; a dispatch mode sends their ops to the body of that name.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from naive_attention import naive_attention
from test_attention import weigh
from test_flash_attn_cpu import ISAS, running_on
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mcp_kernels
from mcp_kernels import _op
from mcp_kernels.testing import assert_same_bits
from mcp_kernels.triton import BODIES, REFUSALS

# Every body that this machine can run.
BACKENDS = ("reference", *(f"cpu_{isa}" for isa in ISAS), "triton")


class TritonMode(TorchDispatchMode):
    """Sends attention ops to their Triton bodies, in the interpreter where there is no GPU."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.split("::", 1)[1]
        if func.namespace != _op.NAMESPACE or name not in REFUSALS:
            return func(*args, **(kwargs or {}))
        if REFUSALS[name](*args) is not None:
            return _op.definitions[name].reference(*args)
        module, function = BODIES[name].split(":")
        return getattr(importlib.import_module(module), function)(*args)


@contextmanager
def running(backend: str) -> Iterator[None]:
    """Attention ops inside run on ``backend``; Triton takes tiles of 16, so that there are many."""
    with contextlib.ExitStack() as stack:
        if backend == "reference":
            stack.enter_context(mcp_kernels.reference_only())
        elif backend == "triton":
            pytest.importorskip("triton")
            from triton_attention import tiles_of

            stack.enter_context(tiles_of(16, 16))
            stack.enter_context(TritonMode())
        else:
            stack.enter_context(running_on(backend.removeprefix("cpu_")))
        yield


def device_of(backend: str) -> str:
    """Where ``backend`` runs."""
    return "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"


def dtype_of(backend: str) -> torch.dtype:
    """float32; what a body is for, where it is for one type."""
    return torch.bfloat16 if backend.endswith("bf16") else torch.float32


def draw(backend: str, *sizes: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of sizes (B, Sq, Sk, H, N, D, E), leaves, in the backend's dtype and place."""
    batch, rows, keys, heads, kv_heads, dim, value_dim = sizes
    q = draw_one(backend, batch, rows, heads, dim, seed=seed)
    k = draw_one(backend, batch, keys, kv_heads, dim, seed=seed + 1)
    v = draw_one(backend, batch, keys, kv_heads, value_dim, seed=seed + 2)
    return q, k, v


def draw_one(backend: str, *shape: int, seed: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    """One normal leaf."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 100))
    return drawn.to(dtype or dtype_of(backend)).to(device_of(backend)).requires_grad_()


@dataclass(frozen=True)
class Result:
    """What a call gave: (out, lse) and the gradients of q, k, v and of what else asks for one."""

    out: Tensor
    lse: Tensor
    grads: list[Tensor]


def call(backend: str, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Result:
    """A call and its gradients under weights that every element of out and lse has."""
    leaves = [q, k, v, *(t for t in kwargs.values() if _wants_gradient(t))]
    with running(backend):
        out, lse = mcp_kernels.flash_attn_func(q, k, v, return_lse=True, **kwargs)
        grads = torch.autograd.grad(weigh(out.cpu(), lse.cpu()), leaves)
    return Result(out.detach().cpu(), lse.detach().cpu(), [g.cpu() for g in grads])


def forward(backend: str, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    """The output of a call."""
    with running(backend), torch.no_grad():
        return mcp_kernels.flash_attn_func(q, k, v, **kwargs).cpu()


def exact(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Result:
    """The same row by row in float64, from what the semantics say; see ``naive_attention``."""
    q, k, v = (t.detach().cpu().double().requires_grad_() for t in (q, k, v))
    leaves = [q, k, v]
    for name, value in kwargs.items():
        if _wants_gradient(value):
            kwargs[name] = value.detach().cpu().double().requires_grad_()
            leaves.append(kwargs[name])
        elif isinstance(value, Tensor):
            kwargs[name] = value.cpu()
    out, lse = naive_attention(q, k, v, **kwargs)
    unused = 0 * sum(t.sum() for t in leaves)  # nothing is visible: no graph
    grads = torch.autograd.grad(weigh(out, lse) + unused, leaves)
    return Result(out.detach(), lse.detach(), list(grads))


def hold(backend: str, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Result:
    """A call on ``backend``, held to ``exact`` in out, lse and every gradient; gives the call's."""
    got, wanted = call(backend, q, k, v, **kwargs), exact(q, k, v, **dict(kwargs))
    assert_close(got.out, wanted.out, 2)
    assert_close(got.lse, wanted.lse, 2)
    for actual, expected in zip(got.grads, wanted.grads, strict=True):
        assert_close(actual, expected, 4)
    return got


def assert_close(actual: Tensor, wanted: Tensor, roundings: int) -> None:
    """Hold numbers of some size to that many roundings of it.

    float32: scores, exponentials and sums of at most some dozen terms of that size are a hundred
    roundoffs each way. 16-bit: P or dS and the result are rounded, products of q and k are not.
    """
    is_narrow = actual.dtype in (torch.bfloat16, torch.float16)
    unit = torch.finfo(actual.dtype).eps / 2 if is_narrow else 64 * 2.0**-24
    seen = wanted[wanted.isfinite()]
    size = max(1.0, float(seen.abs().max())) if seen.numel() else 1.0
    torch.testing.assert_close(
        actual.double(), wanted.double(), rtol=0, atol=roundings * unit * size, equal_nan=True
    )


def _wants_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def assert_same(on: str, actual: Tensor, wanted: Tensor) -> None:
    """Equal bits; the reference's products of another shape differ by their roundings."""
    if on == "reference":
        assert_close(actual, wanted.double(), 1)
    else:
        assert_same_bits(actual.contiguous(), wanted.contiguous())
