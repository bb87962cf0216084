"""Optimizer, learning rate and clipping against torch on the whole model."""

import math
from dataclasses import replace

import pytest
import torch

from mcp_parallel.config import Config
from mcp_parallel.optim.adamw import BETAS, EPS, AdamW
from mcp_parallel.optim.clip import clip_factor, local_square_sum
from mcp_parallel.optim.schedule import learning_rate
from mcp_parallel.parallel.shards import Shard

TRAIN = Config().train


def make_shards(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.wq": (5, 3), "norm.weight": (7,), "empty": (0, 4)}
    shards = []
    for name, shape in shapes.items():
        p = torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))
        p.grad = torch.randn(shape, generator=generator, dtype=dtype)
        shards.append(Shard(name, p, counted_here=True, grad_partial_over_tp=False))
    return shards


def test_adamw_is_torchs_with_decay_on_matrices_alone():
    ours, theirs = make_shards(), make_shards()
    optimizer = AdamW(ours, TRAIN)
    matrices = [s.parameter for s in theirs if s.parameter.dim() > 1]
    vectors = [s.parameter for s in theirs if s.parameter.dim() == 1]
    reference = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": TRAIN.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        betas=BETAS,
        eps=EPS,
    )
    for step in range(4):
        for group in reference.param_groups:
            group["lr"] = 0.1 / (step + 1)
        optimizer.step(0.1 / (step + 1))
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.parameter, b.parameter, rtol=1e-13, atol=1e-14)


def test_moments_and_step_count_are_all_of_the_state():
    whole, halves = make_shards(), make_shards()
    optimizer = AdamW(whole, TRAIN)
    first = AdamW(halves, TRAIN)
    for _ in range(2):
        optimizer.step(0.01)
        first.step(0.01)
    second = AdamW(halves, TRAIN)
    for (_, _, new), (_, _, old) in zip(second.moments(), first.moments(), strict=True):
        new.copy_(old)
    second.set_step_count(2)
    for _ in range(2):
        optimizer.step(0.01)
        second.step(0.01)
    assert all(torch.equal(a.parameter, b.parameter) for a, b in zip(whole, halves, strict=True))


def test_norm_is_torchs_and_counts_only_what_is_counted_here():
    shards = make_shards()
    expected = torch.nn.utils.get_total_norm([s.parameter.grad for s in shards])
    assert local_square_sum(shards).sqrt().item() == pytest.approx(expected.item(), rel=1e-14)
    without = [replace(shards[0], counted_here=False), *shards[1:]]
    difference = local_square_sum(shards) - local_square_sum(without)
    assert difference.item() == pytest.approx(shards[0].parameter.grad.square().sum().item())
    assert local_square_sum([]).item() == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_clipping_is_part_of_the_update(dtype):
    """One update of clipped gradients is torch's clipping and then torch's update."""
    ours, theirs = make_shards(dtype), make_shards(dtype)
    optimizer = AdamW(ours, replace(TRAIN, weight_decay=0.0))
    parameters = [s.parameter for s in theirs]
    reference = torch.optim.AdamW(parameters, lr=0.1, betas=BETAS, eps=EPS, weight_decay=0.0)
    for step in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            generator = torch.Generator().manual_seed(step)
            grad = (step + 1) * torch.randn(other.global_shape, generator=generator, dtype=dtype)
            mine.parameter.grad, other.parameter.grad = grad, grad.clone()
        norm = local_square_sum(ours).sqrt().item()
        optimizer.step(0.1, clip_factor(norm, 0.5))
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        reference.step()
    # Clipping is a rounding or two of each gradient, which moves an update by as much of 0.1; all
    # else about an update is a dozen roundings more, of numbers of about 1.
    tolerance = 16 * torch.finfo(dtype).eps
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.parameter, b.parameter, rtol=tolerance, atol=tolerance)
    by_name = {s.name: s.parameter for s in theirs}
    for moment, shard, values in optimizer.moments():
        want = reference.state[by_name[shard.name]][moment]
        torch.testing.assert_close(values, want, rtol=tolerance, atol=0)


@pytest.mark.parametrize(
    "norm, limit, expected", [(0.5, 1.0, 1.0), (4.0, 1.0, 0.25), (9.0, 0.0, 1.0), (0.0, 1.0, 1.0)]
)
def test_clip_factor(norm, limit, expected):
    assert clip_factor(norm, limit) == pytest.approx(expected, rel=1e-6)


def test_learning_rate_rises_then_falls_to_the_minimum():
    train = replace(TRAIN, steps=100, warmup_steps=10, lr=1.0, min_lr=0.1)
    rates = [learning_rate(step, train) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0)
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.55)  # halfway down the cosine
    assert rates[100] == pytest.approx(0.1)
    # No warm-up, and a run that is all warm-up, divide by nothing.
    assert learning_rate(0, replace(train, warmup_steps=0)) == pytest.approx(1.0)
    assert math.isfinite(learning_rate(99, replace(train, warmup_steps=100)))
