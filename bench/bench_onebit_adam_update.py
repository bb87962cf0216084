"""onebit_adam_update alone, and the whole step of 1-bit Adam after the switch beside torch's AdamW.

Goals: at least 0.9 of the in-place scale's bytes a second; the whole step takes no longer than
``torch.optim.AdamW(fused=True)``, both on huge pages. A rank alone has no server: its step is
compress and update, 22.4 bytes an element to AdamW's 28. With the reduce of one rank it is 30.6.
"""

from __future__ import annotations

import pytest
import torch
from codec_bench import BLOCK_SIZE, NUMEL, PATHS, gradient, in_place_scale, rounds, running_on
from conftest import Peer

from mcp_kernels import (
    onebit_adam_update,
    onebit_compress,
    onebit_compress_momentum,
    onebit_reduce,
    reference_only,
)
from mcp_kernels.optim.flat_buffer import flat_buffer
from mcp_kernels.testing import assert_same_bits, make_gradient

HOW = {"lr": 1e-6, "step_size": 1e-6, "block_size": BLOCK_SIZE}


def codes(numel):
    return onebit_compress(make_gradient(numel, seed=2), torch.zeros(numel), BLOCK_SIZE)


def check_once():
    """A number is worth nothing when the result is wrong."""
    numel = 1 << 20
    param, denom = make_gradient(numel), make_gradient(numel, seed=1).abs() + 1e-3
    expected = param.clone()
    for divisor in (None, denom):
        onebit_adam_update([param], divisor, *codes(numel), weight_decays=[0.1], **HOW)
        with reference_only():
            onebit_adam_update([expected], divisor, *codes(numel), weight_decays=[0.1], **HOW)
        assert_same_bits(param, expected)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.benchmark(group="onebit_adam_update")
def bench_update(path, compare):
    param, packed = gradient(), codes(NUMEL)
    with running_on(path):
        check_once()
        compare(
            lambda: onebit_adam_update([param], None, *packed, weight_decays=[0.1], **HOW),
            (4 + 4 + 1 / 8) * NUMEL,
            {"in_place_scale": in_place_scale()},
            rounds=rounds(path),
        )


def adamw_on_huge_pages(numel):
    """A step of torch's fused AdamW whose weights, gradients and moments lie as ours do."""
    weights = torch.nn.Parameter(gradient(numel))
    weights.grad = gradient(numel, seed=3)
    adamw = torch.optim.AdamW([weights], lr=1e-6, fused=True)
    adamw.step()
    for name in ("exp_avg", "exp_avg_sq"):
        moment = adamw.state[weights][name]
        adamw.state[weights][name] = flat_buffer(numel).copy_(moment)
    return adamw.step


@pytest.mark.parametrize("has_server", [False, True], ids=["alone", "with_reduce"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.benchmark(group="onebit_adam_step")
def bench_whole_step(path, has_server, compare):
    param, grad = gradient(), gradient(seed=1)
    factors = flat_buffer(NUMEL, torch.bfloat16).fill_(1.0)
    error, server_error = flat_buffer(NUMEL), flat_buffer(NUMEL)
    state = list(codes(NUMEL))

    def step():
        bits, scales = onebit_compress_momentum(
            *([grad], *state, error),
            beta1=0.9,
            block_size=BLOCK_SIZE,
            preconditioner=factors,
        )
        if has_server:
            bits, scales = onebit_reduce(bits[None], scales[None], server_error, None, BLOCK_SIZE)
        state[:] = bits, scales
        onebit_adam_update([param], None, *state, weight_decays=[0.1], **HOW)

    with running_on(path):
        check_once()
        compare(
            step,
            (14.25 + 8.25 * has_server + 8.125) * NUMEL,
            {
                "in_place_scale": in_place_scale(),
                "adamw_fused": Peer(adamw_on_huge_pages(NUMEL), 28 * NUMEL),
            },
            rounds=rounds(path),
        )
