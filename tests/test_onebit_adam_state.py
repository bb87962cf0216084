"""Checkpoints of OneBitAdam: bit-exact at the same number of ranks, nothing lost at another."""

from __future__ import annotations

import io

import pytest
import torch
from onebit_models import BLOCK, flat_of, gradients, make_params, set_gradients

from mcp_kernels.ops.block_layout import BlockLayout
from mcp_kernels.optim import OneBitAdam
from mcp_kernels.optim.onebit_state import reshard
from mcp_kernels.testing import assert_same_bits


def make(options):
    params = make_params()
    settings = {"lr": 1e-2, "betas": (0.9, 0.8), "freeze_step": 3, "block_size": BLOCK}
    return params, OneBitAdam(params, **{**settings, **options})


def train(params, optimizer, rank, steps):
    for step in steps:
        set_gradients(params, gradients(rank, step % 3 if step < 4 else 0))
        optimizer.step()


def saved(values):
    """Through a file, read as data and never as code."""
    file = io.BytesIO()
    torch.save(values, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def run_and_resume(rank, world, stop, options):
    params, optimizer = make(options)
    train(params, optimizer, rank, range(stop))
    checkpoint = saved(
        {"optimizer": optimizer.state_dict(), "params": [p.detach() for p in params]}
    )
    train(params, optimizer, rank, range(stop, 25))
    again, resumed = make(options)
    train(again, resumed, rank, range(5))  # a state of its own, to be replaced
    with torch.no_grad():
        for param, value in zip(again, checkpoint["params"], strict=True):
            param.copy_(value)
    resumed.load_state_dict(checkpoint["optimizer"])
    train(again, resumed, rank, range(stop, 25))
    return [p.detach() for p in params], [p.detach() for p in again], optimizer.switch_step


@pytest.mark.parametrize(
    "options, stop",
    [
        ({}, 3),
        ({"zero": 1}, 12),
        ({"freeze_step": "auto"}, 12),
        *(
            pytest.param(options, stop, marks=pytest.mark.slow)
            for options, stop in (
                ({}, 2),
                ({}, 12),
                ({"zero": 1}, 2),
                ({"zero": 1}, 3),
                ({"freeze_step": "auto"}, 2),
            )
        ),
    ],
)
def test_resume_at_the_same_size_is_bit_exact(ranks, stop, options):
    """In stage 1, at the switch, and in stage 2; the automatic rule remembers what it saw."""
    for params, resumed, switch_step in ranks.run(run_and_resume, stop, options, ranks=3):
        assert switch_step is not None
        for param, wanted in zip(resumed, params, strict=True):
            assert_same_bits(param, wanted)


def states_after(rank, world, steps, options):
    params, optimizer = make(options)
    train(params, optimizer, rank, range(steps))
    return optimizer.state_dict(), [p.detach() for p in params]


def held_by(states, layout):
    """Mean worker error plus server error, float64, without padding."""
    buckets = [state["buckets"][0]["tensors"] for state in states]
    mean = torch.stack([b["worker_error"].double() for b in buckets]).mean(0)
    server = torch.cat([b["server_error"].double() for b in buckets])
    mean[: server.numel()] += server
    return mean[flat_of([torch.ones(size) for size in layout.sizes], layout).bool()]


@pytest.mark.parametrize("zero", (0, 1))
@pytest.mark.parametrize("old, new", [(2, 4), (4, 2), (3, 4), (4, 1), (1, 4)])
def test_another_size_conserves_what_the_errors_hold(ranks, old, new, zero):
    states = [state for state, _ in ranks.run(states_after, 10, {"zero": zero}, ranks=old)]
    resharded = [reshard(states, new, rank) for rank in range(new)]
    sizes = states[0]["buckets"][0]["sizes"]
    before = held_by(states, BlockLayout(sizes, BLOCK, old))
    after = held_by(resharded, BlockLayout(sizes, BLOCK, new))
    # The mean over the ranks is rounded to float32 once.
    assert (after - before).abs().max() <= 2.0**-24 * before.abs().max()
    assert before.norm() > 0
    dropped = [reshard(states, new, rank, error_feedback="drop") for rank in range(new)]
    assert not held_by(dropped, BlockLayout(sizes, BLOCK, new)).any()


def resume_elsewhere(rank, world, states, values, options):
    params, optimizer = make(options)
    with torch.no_grad():
        for param, value in zip(params, values, strict=True):
            param.copy_(value)
    optimizer.load_state_dict(reshard(states, world, rank))
    train(params, optimizer, rank, range(10, 14))
    return [p.detach() for p in params]


@pytest.mark.parametrize("steps, zero", [(2, 0), (2, 1), (3, 1), (10, 0), (10, 1)])
def test_training_goes_on_at_another_size(ranks, steps, zero):
    """Replicas stay equal, and ZeRO-1 does what replicated state does."""
    results = ranks.run(states_after, steps, {"zero": zero}, ranks=2)
    states, values = [state for state, _ in results], results[0][1]
    at_four = ranks.run(resume_elsewhere, states, values, {"zero": zero})
    for params in at_four:
        for param, replica, start in zip(params, at_four[0], values, strict=True):
            assert_same_bits(param, replica, "replica")
            assert not torch.equal(param, start)
    plain = ranks.run(states_after, steps, {}, ranks=2)
    states, values = [state for state, _ in plain], plain[0][1]
    for param, wanted in zip(
        at_four[0], ranks.run(resume_elsewhere, states, values, {})[0], strict=True
    ):
        torch.testing.assert_close(param, wanted, rtol=0, atol=1e-6)


def test_another_ranks_state_is_refused(ranks):
    states = [state for state, _ in ranks.run(states_after, 4, {}, ranks=2)]
    _, optimizer = make({})
    with pytest.raises(ValueError, match=r"world_size must be 1, got 2; .*reshard"):
        optimizer.load_state_dict(states[0])
    with pytest.raises(ValueError, match="states must be of all ranks in order, got ranks"):
        reshard(states[1:], 1, 0)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 0\], got 1"):
        reshard(states, 1, 1)
    other = OneBitAdam(make_params()[:2], block_size=BLOCK)
    with pytest.raises(ValueError, match="names must be"):
        other.load_state_dict(reshard(states, 1, 0))


def test_state_of_other_groups_is_refused_before_anything_is_loaded():
    params = make_params()
    one = OneBitAdam(params, block_size=BLOCK)
    two = OneBitAdam([{"params": params[:1]}, {"params": params[1:]}], block_size=BLOCK)
    with pytest.raises(ValueError, match="param_groups must be 2, got 1"):
        two.load_state_dict(one.state_dict())
    apart = OneBitAdam([{"params": params[:1], "eps": 1e-6}, {"params": params[1:]}])
    with pytest.raises(ValueError, match="buckets must be 2, got 1"):
        apart.load_state_dict(OneBitAdam(params).state_dict())
