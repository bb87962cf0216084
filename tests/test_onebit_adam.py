"""1-bit Adam against its definition in one process; what it conserves, skips and masks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from onebit_models import (
    BLOCK,
    SHAPES,
    DefinedOneBitAdam,
    flat_of,
    gradients,
    make_params,
    set_gradients,
)
from ranks import RankPool

from mcp_kernels import onebit_decompress
from mcp_kernels.optim import OneBitAdam
from mcp_kernels.testing import assert_same_bits

LR, BETAS, EPS = 1e-2, (0.9, 0.99), 1e-8
DECAYS = (0.1, 0.1, 0.0, 0.0)
# A step rounds a parameter (below 4) a few times; the float32 momentum of the first compressed
# step is added with one rounding less than in the definition.
TOLERANCE_A_STEP = 4 * 2.0**-23


def make_optimizer(params, **options):
    half = len(params) // 2
    groups = [
        {"params": params[:half], "weight_decay": 0.1},
        {"params": params[half:], "weight_decay": 0.0},
    ]
    settings = {"lr": LR, "betas": BETAS, "eps": EPS, "block_size": BLOCK, "freeze_step": 3}
    settings["variance_floor"] = 0.0  # as in the paper
    return OneBitAdam(groups, **{**settings, **options})


def run_steps(rank, world, steps, dtype, options):
    params = make_params(dtype=dtype)
    optimizer = make_optimizer(params, **options)
    history = []
    for step in range(steps):
        grads = gradients(rank, step, dtype=dtype)
        if options.get("grads") == "averaged" and not optimizer.is_compressing:
            every = [gradients(r, step, dtype=dtype) for r in range(world)]
            grads = [torch.stack(found).mean(0) for found in zip(*every, strict=True)]
        set_gradients(params, grads)
        optimizer.step()
        history.append([param.detach().clone() for param in params])
    return history


def assert_close(params, expected, step):
    for param, wanted in zip(params, expected, strict=True):
        assert (param - wanted).abs().max() <= (step + 1) * TOLERANCE_A_STEP


@pytest.mark.parametrize("zero", (0, 1))
@pytest.mark.parametrize("world", (1, 2, 3, 4, 6))
def test_equals_its_definition_and_replicas_are_equal(ranks, world, zero):
    """Three steps of AdamW, the switch, five steps of signs: a wrong sign is off by about lr."""
    definition = DefinedOneBitAdam(world, 3, LR, BETAS, EPS, DECAYS)
    pool = ranks if world <= 4 else RankPool(world)
    results = pool.run(run_steps, 8, torch.float32, {"zero": zero}, ranks=world)
    if pool is not ranks:
        pool.close()
    for step in range(8):
        definition.step([gradients(rank, step) for rank in range(world)])
        for history in results:
            for param, replica in zip(results[0][step], history[step], strict=True):
                assert_same_bits(param, replica, "replica")
        assert_close(results[0][step], [p.detach() for p in definition.params], step)


@pytest.mark.parametrize("options", ({}, {"grads": "averaged"}, {"zero": 1}))
def test_stage_1_is_adamw_of_torch(ranks, options):
    world, steps = 3, 20
    definition = DefinedOneBitAdam(world, steps + 1, LR, BETAS, EPS, DECAYS)
    results = ranks.run(run_steps, steps, torch.float32, {"freeze_step": 99, **options}, ranks=3)
    for step in range(steps):
        moved = (step + 1) * LR  # the most that Adam moves a parameter
        definition.step([gradients(rank, step) for rank in range(world)])
        for param, wanted in zip(results[0][step], definition.params, strict=True):
            torch.testing.assert_close(param, wanted.detach(), rtol=1e-6, atol=1e-6 * moved)


def test_float64_in_stage_1():
    params, definition = make_params(dtype=torch.float64), make_params(dtype=torch.float64)
    optimizer = make_optimizer(params, freeze_step=99)
    adam = torch.optim.AdamW(
        [
            {"params": definition[:2], "weight_decay": 0.1},
            {"params": definition[2:], "weight_decay": 0.0},
        ],
        lr=LR,
        betas=BETAS,
        eps=EPS,
        fused=True,
    )
    for step in range(5):
        grads = gradients(0, step, dtype=torch.float64)
        for found, one in ((params, optimizer), (definition, adam)):
            set_gradients(found, grads)
            one.step()
    for param, wanted in zip(params, definition, strict=True):
        assert_same_bits(param.detach(), wanted.detach())


# --- conservation -------------------------------------------------------------------------------


def momentum_sums(rank, world, steps):
    """(applied momenta + what errors hold, what came in) over ``steps`` steps, in float64."""
    params = make_params()
    optimizer = make_optimizer(params, freeze_step=1)
    (bucket,) = optimizer.buckets
    layout, beta1 = bucket.layout, BETAS[0]
    applied = torch.zeros(layout.padded_numel, dtype=torch.float64)
    came_in = applied.clone()
    for step in range(steps):
        before = None
        if optimizer.is_compressing:
            before = bucket.exp_avg
            if before is None:
                before = onebit_decompress(bucket.bits, bucket.scales, layout.padded_numel, BLOCK)
            before = before.double().clone()
        set_gradients(params, gradients(rank, step))
        optimizer.step()
        if before is not None:
            every = [flat_of(gradients(r, step), layout).double() for r in range(world)]
            seen = torch.stack(every).mean(0) * bucket.preconditioner
            came_in += beta1 * before + (1 - beta1) * seen
            applied += onebit_decompress(
                bucket.bits, bucket.scales, layout.padded_numel, BLOCK
            ).double()
    held = bucket.worker_error.double() / world
    if world > 1:
        chunk = layout.chunk_numel
        held[rank * chunk : (rank + 1) * chunk] += bucket.server_error.double()
        dist.all_reduce(held)
    valid = flat_of([torch.ones(p.shape) for p in params], layout).bool()
    return applied[valid], held, came_in[valid], valid


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_gradients_arrive_in_the_end(ranks, world):
    for applied, held, came_in, valid in ranks.run(momentum_sums, 200, ranks=world):
        fault = (applied + held[valid] - came_in).norm() / came_in.norm()
        assert fault < 1e-5
        assert held[valid].norm() > 10 * fault * came_in.norm()
        assert not held[~valid].any()  # padding holds nothing


# --- NaN, clipping, accumulation ----------------------------------------------------------------


def everything(optimizer, params):
    """All state as one list of tensors."""
    state = optimizer.state_dict()
    tensors = [t for bucket in state["buckets"] for t in bucket["tensors"].values()]
    steps = [bucket["steps"] for bucket in state["buckets"]]
    return [t.clone() for t in (*tensors, *steps, *(p.detach() for p in params))]


def skipped_step(rank, world, good_steps, bad, options):
    params = make_params()
    optimizer = make_optimizer(params, **options)
    for step in range(good_steps):
        set_gradients(params, gradients(rank, step))
        optimizer.step()
    before, count = everything(optimizer, params), optimizer.count
    grads = gradients(rank, good_steps)
    if rank == world - 1:
        grads[3].view(-1)[500] = bad
    set_gradients(params, grads)
    optimizer.step()
    after = everything(optimizer, params)
    reported = optimizer.last_step.is_skipped, optimizer.num_skipped, optimizer.count - count
    set_gradients(params, gradients(rank, good_steps + 1))
    optimizer.step()
    return before, after, reported, all(p.isfinite().all() for p in params)


@pytest.mark.parametrize(
    "good_steps, bad", [(1, float("nan")), (3, float("inf")), (5, float("nan"))]
)
@pytest.mark.parametrize("options", ({}, {"zero": 1, "clip_norm": 1.0}))
def test_a_nan_on_one_rank_skips_the_step_on_all(ranks, good_steps, bad, options):
    for before, after, reported, is_finite in ranks.run(
        skipped_step, good_steps, bad, options, ranks=3
    ):
        for old, new in zip(before, after, strict=True):
            assert_same_bits(new, old, "state")
        assert reported == (True, 1, 0)
        assert is_finite


def clipped_steps(rank, world, clip_norm):
    params, scaled = make_params(), make_params()
    optimizer = make_optimizer(params, clip_norm=clip_norm)
    by_hand = make_optimizer(scaled)
    norms = []
    for step in range(6):
        every = [gradients(r, step) for r in range(world)]
        if optimizer.is_compressing:
            squares = [sum(g.double().square().sum() for g in grads) for grads in every]
            norm = (sum(squares) / world).sqrt()  # root mean square of the ranks' norms
        else:
            means = [torch.stack(found).mean(0) for found in zip(*every, strict=True)]
            norm = sum(g.double().square().sum() for g in means).sqrt()
        coefficient = min(1.0, clip_norm / (norm.item() + 1e-6))
        set_gradients(params, every[rank])
        set_gradients(scaled, [g * coefficient for g in every[rank]])
        optimizer.step()
        by_hand.step()
        norms.append((optimizer.last_step.grad_norm, norm.item(), coefficient))
    return [p.detach() for p in params], [p.detach() for p in scaled], norms


def test_clipping_is_one_coefficient_from_one_norm(ranks):
    results = ranks.run(clipped_steps, 0.5, ranks=3)
    for params, scaled, norms in results:
        for norm, expected, coefficient in norms:
            assert abs(norm - expected) <= 1e-6 * expected
            assert coefficient < 0.5  # it did clip
        assert [norm for norm, _, _ in norms] == [norm for norm, _, _ in results[0][2]]
        for param, wanted in zip(params, scaled, strict=True):
            # Scaling before or after the mean differs by roundings, which Adam's quotient keeps.
            torch.testing.assert_close(param, wanted, rtol=0, atol=1e-3 * LR)


def accumulated(rank, world, parts):
    params = make_params()
    optimizer = make_optimizer(params)
    for step in range(6):
        optimizer.zero_grad()
        for part in range(parts):
            for param, grad in zip(params, gradients(rank, step), strict=True):
                # Parts that sum up to the gradient without rounding.
                weight = 1.0 if parts == 1 else (0.25, 0.75)[part]
                (param * (grad * weight)).sum().backward()
        optimizer.step()
    return [p.detach() for p in params]


def test_accumulation_is_one_update_of_the_sum(ranks):
    whole, parts = ranks.run(accumulated, 1, ranks=2), ranks.run(accumulated, 2, ranks=2)
    for one, two in zip(whole[0], parts[0], strict=True):
        torch.testing.assert_close(two, one, rtol=0, atol=1e-3 * LR)


# --- parameters without gradient, mask ----------------------------------------------------------


def without_gradient(rank, world, as_zeros):
    params = make_params()
    optimizer = make_optimizer(params)
    for step in range(6):
        grads = gradients(rank, step)
        if rank == 1:
            grads[2] = torch.zeros_like(grads[2]) if as_zeros else None
        if step < 2:
            grads[1] = None
        set_gradients(params, grads)
        optimizer.step()
        if step == 1:
            untouched = params[1].detach().clone()
    return [p.detach() for p in params], untouched


def test_no_gradient_on_one_rank_is_zeros_there(ranks):
    """And none on any rank leaves the parameter alone in stage 1, weight decay included."""
    results, zeros = ranks.run(without_gradient, False), ranks.run(without_gradient, True)
    for (params, untouched), (expected, _) in zip(results, zeros, strict=True):
        for param, wanted, first in zip(params, expected, results[0][0], strict=True):
            assert_same_bits(param, wanted)
            assert_same_bits(param, first, "replica")
        assert_same_bits(untouched, make_params()[1].detach())


def masked_steps(options):
    params = make_params()
    optimizer = make_optimizer(params, weight_decay=0.0, **options)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    for step in range(6):
        grads = gradients(0, step)
        grads[0][2] = 0.0  # a row that is never used
        set_gradients(params, grads)
        optimizer.step()
    return optimizer, params


def test_coordinates_without_variance_are_masked():
    optimizer, params = masked_steps({})
    start = make_params()
    assert optimizer.num_masked == SHAPES[0][1]
    assert_same_bits(params[0][2].detach(), start[0][2].detach())
    assert (params[0].detach() != start[0].detach())[[0, 1, 3, 4, 5, 6]].all()
    nothing, params = masked_steps({"mask": lambda name, v_hat: None})
    assert nothing.num_masked == 0
    # This is what the mask is for: such a row is moved as its neighbours in the block are.
    assert (params[0][2] - start[0][2]).abs().max() > 0.1 * LR


def test_variance_floor():
    """Where the floor is 1 a block's largest factor is one over its root mean variance."""
    optimizer, _ = masked_steps({"variance_floor": 1.0})
    plain, _ = masked_steps({})
    (bucket,), (other,) = optimizer.buckets, plain.buckets
    counts = bucket.layout.counts()
    seen = other.preconditioner > 0
    assert torch.equal(seen, bucket.preconditioner > 0)
    assert (~seen).sum() == SHAPES[0][1]
    valid = flat_of([torch.ones(p.shape) for p in make_params()], bucket.layout).bool() & seen
    root = torch.where(valid, 1 / other.preconditioner.double() - EPS, 0.0).view(-1, BLOCK)
    lowest = (root.square().sum(1) / counts.clamp(min=1)).sqrt()
    expected = 1 / (torch.maximum(root, lowest[:, None]).view(-1) + EPS)
    actual = bucket.preconditioner.double()[valid]
    # Factors are bfloat16: one rounding of 2^-8 here, one in what the roots were made of.
    torch.testing.assert_close(actual, expected[valid], rtol=2 * 2.0**-8, atol=0)
    assert not torch.equal(bucket.preconditioner, other.preconditioner)
