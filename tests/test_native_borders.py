"""What a caller of torch.ops may hand to the compiled bodies: refused where it would lead out.

The public functions refuse most of this in Python, before a body sees it.
"""

from __future__ import annotations

import pytest
import torch
from bodies import ISAS, running_on

import mcp_kernels

OPS = torch.ops.mcp_kernels
LARGEST = 1 << 62  # times 4 it is 0 in 64 bits

pytestmark = pytest.mark.skipif(not ISAS, reason="a pure-Python install has no compiled body")


def of_bytes(*shape):
    return torch.empty(shape, dtype=torch.uint8)


def adam(**given):
    tensors = {"denom": None, "bits": of_bytes(0), "master": None, "moves": None, **given}
    OPS.onebit_adam_update(
        [torch.zeros(100)],
        tensors["denom"],
        tensors["bits"],
        torch.ones(32),
        0.1,
        0.1,
        [0.0],
        LARGEST,
        tensors["master"],
        tensors["moves"],
    )


def momentum():
    bits, error = of_bytes(0), torch.empty(0)
    OPS.onebit_compress_momentum(
        [torch.zeros(100)], bits, torch.ones(32), error, 0.9, 1.0, LARGEST, None
    )


def reduce_of(name):
    def call():
        ranks = LARGEST  # of 8 bytes, or 4 for int4
        codes, scales = of_bytes(ranks, 0), torch.empty(0)
        getattr(OPS, f"{name}_reduce")(codes, scales, torch.zeros(64), None, 8)

    return call


@pytest.mark.parametrize(
    "call",
    [adam, momentum, *map(reduce_of, ("onebit", "int8", "int4", "fp8"))],
    ids=["adam", "momentum", "onebit_reduce", "int8_reduce", "int4_reduce", "fp8_reduce"],
)
def test_a_size_that_wraps_around_is_no_small_size(call):
    with pytest.raises(RuntimeError, match=r"(bits|codes) must have \d+ times \d+ elements, got 0"):
        call()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("step", [1, 2], ids=["dense", "every second"])
def test_a_mask_shows_where_its_bytes_are_not_zero(isa, step):
    """A view of bytes as bool may hold any; 37 keys end within a register of each set."""
    q = torch.randn(2, 3, 5, 8)
    k, v = torch.randn(2, 2, 3, 37, 8)
    shown = torch.rand(2, 1, 5, 37) < 0.5
    memory = torch.zeros(2, 1, 5, 37 * step, dtype=torch.uint8)
    memory[..., ::step] = torch.where(shown, torch.arange(37, dtype=torch.uint8) + 2, 0)
    with running_on(isa):
        got = mcp_kernels.scaled_dot_product_attention(
            q, k, v, attn_mask=memory.view(torch.bool)[..., ::step]
        )
        expected = mcp_kernels.scaled_dot_product_attention(q, k, v, attn_mask=shown)
    assert torch.equal(got, expected)


def flash_attn(q):
    return OPS.flash_attn(q, q, q, None, None, None, None, 1.0, -1, -1, False, 0.0, 0.0)


def flash_attn_varlen(q):
    ends = torch.tensor([0, 5])
    return OPS.flash_attn_varlen(
        q[0], q[0], q[0], ends, ends, None, None, None, 1.0, -1, -1, False, 0.0, 0.0
    )


def flash_attn_kvcache(q):
    return OPS.flash_attn_kvcache(
        *(q, q, q, None, None, None, None, torch.tensor([5]), None, None, None, None, None),
        *(False, 1.0, -1, -1, False, 0.0),
    )


@pytest.mark.parametrize("op", [flash_attn, flash_attn_varlen, flash_attn_kvcache])
def test_attention_is_of_no_other_type(op):
    """A bool has a type of its own here, that of masks."""
    assert torch.isfinite(op(torch.randn(1, 5, 2, 8))[0]).all()
    for dtype in (torch.bool, torch.int32):
        with pytest.raises(RuntimeError, match="q must be float64, float32, bfloat16 or float16"):
            op(torch.ones(1, 5, 2, 8, dtype=dtype))


def test_a_gradient_of_no_bias_is_refused():
    q = torch.randn(1, 5, 2, 8)
    out, lse = flash_attn(q)
    options = (1.0, -1, -1, False, 0.0, 0.0)
    with pytest.raises(RuntimeError, match="bias must be given"):
        OPS.flash_attn_bwd(q, None, q, q, q, out, lse, None, None, None, None, True, *options, None)
