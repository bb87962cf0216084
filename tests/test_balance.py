"""Stages and shares: nothing can be balanced better, and the model's costs are what is computed."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from mcp_parallel.cli.check import summarize
from mcp_parallel.cli.plan import timeline_of
from mcp_parallel.config import Config
from mcp_parallel.division import microbatch_counts, rows_of, stage_layers
from mcp_parallel.layout import Layout, split_layers
from mcp_parallel.memory.sizes import stages_of
from mcp_parallel.model.loss import IGNORED
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.planner.balance import (
    LayerCosts,
    choose_shares,
    imbalance,
    modelled_costs,
    rank_costs,
    split_by_cost,
    stage_factors,
)
from mcp_parallel.schedules.build import build_plan
from mcp_parallel.schedules.simulate import Costs, simulate
from mcp_parallel.step import TrainingStep

LAYOUTS = [
    Layout(pp=2),
    Layout(pp=3, schedule="gpipe"),
    Layout(pp=4),
    Layout(pp=2, schedule="interleaved", virtual_stages=2),
    Layout(pp=2, schedule="zbv"),
    Layout(pp=2, schedule="dualpipev"),
]


def compositions(total, parts):
    """Every way to write ``total`` as so many numbers of at least 1, in order."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        bounds = (0, *cuts, total)
        yield [bounds[i + 1] - bounds[i] for i in range(parts)]


cost = st.integers(0, 40)


@given(
    layout=st.sampled_from(LAYOUTS),
    extra=st.integers(0, 5),
    ends=st.tuples(cost, cost),
    block=st.integers(1, 10),
    slowness=st.lists(st.integers(1, 4), min_size=4, max_size=4),
)
@settings(deadline=None, max_examples=150)
def test_no_other_split_has_a_smaller_largest_rank(layout, extra, ends, block, slowness):
    num_layers, slowness = layout.num_stages + extra, slowness[: layout.pp]
    costs = LayerCosts(embedding=ends[0], block=block, head=ends[1])
    split = split_by_cost(num_layers, layout, costs, slowness)
    assert sum(split) == num_layers
    assert min(split) >= 1
    best = min(
        max(rank_costs(other, layout, costs, slowness))
        for other in compositions(num_layers, layout.num_stages)
    )
    assert max(rank_costs(split, layout, costs, slowness)) == best


@given(num_layers=st.integers(1, 60), pp=st.integers(1, 8))
@settings(deadline=None)
def test_without_ends_the_split_is_that_by_count(num_layers, pp):
    num_layers = max(num_layers, pp)
    costs = LayerCosts(embedding=0.0, block=0.1, head=0.0)
    split = split_by_cost(num_layers, Layout(pp=pp), costs)
    assert split == [len(layers) for layers in split_layers(num_layers, pp)]


def test_within_a_rank_the_stage_with_the_head_has_fewer_blocks():
    layout = Layout(pp=2, schedule="zbv")  # rank 0 has stages 0 and 3
    costs = LayerCosts(embedding=0.0, block=1.0, head=2.0)
    assert split_by_cost(10, layout, costs) == [3, 3, 3, 1]


@given(
    speeds=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    extra=st.integers(0, 6),
    step=st.integers(1, 2),
    least=st.integers(1, 2),
)
@settings(deadline=None)
def test_no_other_shares_are_done_earlier(speeds, extra, step, least):
    start = -(-least // step) * step
    units = start * len(speeds) + extra * step
    shares = choose_shares(speeds, units, step=step, least=least)
    allowed = [
        [step * part for part in parts]
        for parts in compositions(units // step, len(speeds))
        if min(parts) * step >= least
    ]
    assert list(shares) in allowed

    def done(counts):
        return max(n / speed for n, speed in zip(counts, speeds, strict=True))

    assert done(shares) == min(done(other) for other in allowed)


def test_shares_follow_speeds():
    assert choose_shares([3, 1], 8) == (6, 2)
    assert choose_shares([1, 1, 1], 9) == (3, 3, 3)
    assert choose_shares([100, 1], 8) == (7, 1)
    assert choose_shares([2, 1], 12, step=4, least=2) == (8, 4)


@pytest.mark.parametrize(
    ("speeds", "units", "words"),
    [
        ([1, 0], 8, "speeds must be above 0, got"),
        ([1, float("nan")], 8, "speeds must be above 0, got"),
        ([1, 1, 1], 2, "at least 1 for each of 3 replicas, got 2; use 3"),
    ],
)
def test_shares_that_cannot_be_chosen_are_refused(speeds, units, words):
    with pytest.raises(ValueError, match=words):
        choose_shares(speeds, units)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.schedule} {layout.pp}")
def test_a_simulated_pipeline_takes_its_stages_as_they_are(layout):
    split = [1 + stage % 3 for stage in range(layout.num_stages)]
    costs = LayerCosts(embedding=1.0, block=2.0, head=5.0)
    factors = stage_factors(split, costs)
    assert sum(factors) == pytest.approx(layout.num_stages)
    plan = build_plan(layout.schedule, layout.pp, 4 * layout.pp, layout.stages_per_rank)
    timeline = simulate(plan, Costs(stages=factors))
    # Forward and both gradients of every stage and micro-batch, each on the rank that has it.
    mean = (1.0 + 2.0 * sum(split) + 5.0) / layout.num_stages
    for rank, work in enumerate(rank_costs(split, layout, costs)):
        assert timeline.busy(rank) == pytest.approx(3 * 4 * layout.pp * work / mean)


def test_imbalance_is_how_far_the_largest_is_above_the_mean():
    assert imbalance([1, 1, 1]) == 0
    assert imbalance([1, 3]) == 0.5


# --- modelled costs ------------------------------------------------------------------------------

SIZES = {"hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 24}


def counted(config):
    """Operations of a step on one sample, as torch counts those of its matrix products."""
    mesh = build_mesh(Layout(), torch.device("cpu"))
    assert mesh is not None
    step = TrainingStep(config, mesh)
    if config.model.family == "vit":
        pixels = config.model.patch_size**2 * config.model.channels
        inputs, targets = torch.ones(1, config.model.seq_len, pixels), torch.zeros(1).long()
    else:
        inputs = torch.zeros(1, config.model.seq_len, dtype=torch.int64)
        targets = inputs + 1
    assert (targets != IGNORED).all()
    with FlopCounterMode(display=False) as counter:
        step(inputs, targets, 1e-3)
    return counter.get_total_flops()


def shape(family, layers, **changes):
    model = {"preset": "tiny", "seq_len": 32, "vocab_size": 50, **SIZES}
    if family == "vit":
        model = {"preset": "vit-digits", **SIZES, "num_kv_heads": 4}
    train = {"global_batch_size": 1, "micro_batch_size": 1}
    return Config.from_mapping(
        {"model": {**model, "num_layers": layers, **changes}, "train": train}
    )


def attention_of(config):
    """Attention as torch counts a plain one, its scores made again backward; half under a mask."""
    model = config.model
    q, k, v = (
        torch.ones(4, model.seq_len, model.hidden_size // 4, requires_grad=True) for _ in range(3)
    )
    with FlopCounterMode(display=False) as counter:
        ((q @ k.mT) @ v).sum().backward()
        (q @ k.mT).detach()
    return counter.get_total_flops() / (2 if model.family == "llama" else 1)


@pytest.mark.parametrize("family", ["llama", "vit"])
def test_a_modelled_block_is_what_a_block_computes(family):
    one, two = shape(family, 1), shape(family, 2)
    products = counted(two) - counted(one)  # attention is an op of ours, which torch does not know
    assert modelled_costs(one).block == products + attention_of(one)


@pytest.mark.parametrize("family", ["llama", "vit"])
def test_modelled_ends_are_what_is_left(family):
    config = shape(family, 1)
    costs = modelled_costs(config)
    ends = costs.head + (costs.embedding if family == "vit" else 0)  # a lookup has no product
    assert counted(config) - (costs.block - attention_of(config)) == ends


def test_full_checkpointing_adds_a_forward_pass_to_each_block():
    plain = shape("llama", 1)
    full = replace(plain, memory=replace(plain.memory, activation_checkpointing="full"))
    model = plain.model
    weights = 2 * 16**2 + 2 * 16 * 8 + 3 * 16 * 24
    forward = model.seq_len * (2 * weights + 2 * model.seq_len * 16)
    assert modelled_costs(full).block - modelled_costs(plain).block == forward
    assert modelled_costs(full).head == modelled_costs(plain).head


# --- what follows the split ----------------------------------------------------------------------


def config_of(*overrides):
    train = {"global_batch_size": 16, "micro_batch_size": 2}
    return Config.from_mapping({"train": train}).with_overrides(overrides)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_check_and_the_memory_estimate_follow_the_split(schedule):
    large = ["model.vocab_size=65536", "model.num_layers=12", f"parallel.schedule={schedule}"]
    config = config_of("parallel.pp=2", "parallel.stage_split=model", *large)
    found, by_count = summarize(config), summarize(config_of("parallel.pp=2", *large))
    sizes = [stop - start for start, stop in (stage["layers"] for stage in found["stages"])]
    assert sizes == [len(layers) for layers in stage_layers(config)]
    held = [stage for rank in range(2) for stage in stages_of(config, rank)]
    assert {stage.index: stage.num_layers for stage in held} == dict(enumerate(sizes))
    assert sum(sizes) == 12
    assert found["imbalance"] < by_count["imbalance"]
    assert sum(found["stage_costs"]) == pytest.approx(1)


def test_a_drawn_pipeline_follows_split_and_shares():
    changes = ["parallel.pp=2", "parallel.stage_split=3,1", "model.vocab_size=8192"]
    config = config_of("parallel.dp=2", "parallel.dp_shares=3,1", *changes)
    timeline = timeline_of(config, Costs())
    assert timeline.plan.num_microbatches == 6
    loads = rank_costs([3, 1], Layout(pp=2), modelled_costs(config))
    assert timeline.busy(1) / timeline.busy(0) == pytest.approx(loads[1] / loads[0])


def test_numbers_are_taken_as_they_are():
    config = config_of("parallel.pp=2", "parallel.stage_split= 1, 3")
    assert stage_layers(config) == [range(1), range(1, 4)]
    assert stage_layers(config_of("parallel.stage_split=model")) == [range(4)]


def test_rows_of_replicas_are_their_shares_of_the_batch():
    config = config_of("parallel.dp=3", "parallel.dp_shares=5,1,2")
    assert microbatch_counts(config) == [5, 1, 2]
    assert [rows_of(config, dp) for dp in range(3)] == [range(10), range(10, 12), range(12, 16)]
    equal = config_of("parallel.dp=2", "parallel.dp_shares=7,7")
    assert [rows_of(equal, dp) for dp in range(2)] == [range(8), range(8, 16)]
    text = summarize(config)
    assert text["microbatches"] == 5
    assert text["microbatches_by_dp_rank"] == [5, 1, 2]
