"""Schedules on paper: complete, free of deadlock, as idle and as large as their papers say."""

from __future__ import annotations

import logging
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_sizes import sizes

from mcp_parallel.layout import Layout
from mcp_parallel.schedules.action import Action, owner_of
from mcp_parallel.schedules.build import SCHEDULES, build_plan
from mcp_parallel.schedules.simulate import Costs, DeadlockError, simulate
from mcp_parallel.schedules.validate import most_alive, peak_alive, validate

# Multiples of 1/64: sums of a few hundred of them are exact in float64.
exact_times = st.integers(1, 640).map(lambda n: n / 64)


@given(sizes())
@settings(max_examples=300, deadline=None)
def test_every_plan_is_one(size):
    validate(build_plan(*size))


@given(size=sizes(), forward=exact_times, grad=exact_times, weight=exact_times, comm=exact_times)
@settings(max_examples=200, deadline=None)
def test_no_two_actions_of_a_rank_overlap_and_none_starts_before_its_input(
    size, forward, grad, weight, comm
):
    plan = build_plan(*size)
    timeline = simulate(plan, Costs(forward, grad, weight, comm))
    # Every end by kind, where B is both gradients; what each action reads, stated again.
    end = {}
    for spans in timeline.ranks:
        for span in spans:
            kind, stage, microbatch, _ = span.action
            end["I" if kind == "B" else kind, stage, microbatch] = span.end
    last = plan.num_stages - 1
    for rank, spans in enumerate(timeline.ranks):
        assert [span.action for span in spans] == list(plan.orders[rank])
        assert all(one.end <= two.start for one, two in pairwise(spans))
        for span in spans:
            kind, stage, microbatch, _ = span.action
            reads = {
                "F": [("F", stage - 1)] if stage else [],
                "W": [("I", stage)],
            }.get(kind, [("F", stage), *([("I", stage + 1)] if stage < last else [])])
            for what, where in reads:
                late = comm if plan.owner(where) != rank else 0.0
                assert span.start >= end[what, where, microbatch] + late, span


# ---------------------------------------------------------------- the papers' formulas

RANKS = [1, 2, 3, 4, 8]


@given(forward=exact_times, grad=exact_times, weight=exact_times, extra=st.integers(0, 9))
@pytest.mark.parametrize("p", RANKS)
@settings(max_examples=20, deadline=None)
def test_gpipe_and_1f1b_wait_for_p_minus_1_micro_batches(p, forward, grad, weight, extra):
    m = p + extra
    for schedule in ("gpipe", "1f1b"):
        timeline = simulate(build_plan(schedule, p, m), Costs(forward, grad, weight))
        whole = forward + grad + weight
        assert timeline.makespan == (m + p - 1) * whole
        for rank in range(p):
            assert timeline.bubble(rank) == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("v", [2, 3, 4])
@given(forward=exact_times, rounds=st.integers(1, 4))
@settings(max_examples=10, deadline=None)
def test_interleaved_divides_the_bubble_by_v(p, v, forward, rounds):
    # The paper's figure and its formula hold for a backward of about two forwards.
    m = rounds * p
    timeline = simulate(build_plan("interleaved", p, m, v), Costs(forward, forward, forward))
    assert timeline.bubble(0) == pytest.approx((p - 1) / (m * v + p - 1), abs=1e-12)


@pytest.mark.parametrize("p", RANKS)
@given(weight=exact_times, more=exact_times, extra=st.integers(0, 9))
@settings(max_examples=20, deadline=None)
def test_zb_h1_waits_p_minus_1_times_f_plus_i_minus_w(p, weight, more, extra):
    # Qi et al., table 2: (p - 1)(T_F + T_B - T_W), for W no longer than the others.
    forward = grad = weight + more
    m = 2 * p + extra
    timeline = simulate(build_plan("zero_bubble", p, m), Costs(forward, grad, weight))
    idle = (p - 1) * (forward + grad - weight)
    assert timeline.makespan - timeline.busy(p - 1) == pytest.approx(idle, rel=1e-12)


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("v", [2, 3])
def test_interleaved_zero_bubble_divides_that_by_v(p, v):
    # In units of a chunk: F = I = W = 1.
    timeline = simulate(build_plan("zero_bubble", p, 4 * p, v))
    assert {timeline.makespan - timeline.busy(r) for r in range(p)} == {p - 1}


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("extra", [0, 1, 7])
def test_zb_v_has_no_bubble_where_f_i_and_w_are_equal(p, extra):
    # Qi et al., section 6: ranks start one chunk after the other and then never wait.
    timeline = simulate(build_plan("zbv", p, 2 * p + extra, 2))
    assert [timeline.gap(rank) for rank in range(p)] == [0] * p
    assert [spans[0].start for spans in timeline.ranks] == list(range(p))


@pytest.mark.parametrize("p", RANKS)
@given(forward=exact_times, grad=exact_times, weight=exact_times, extra=st.integers(0, 9))
@settings(max_examples=20, deadline=None)
def test_dualpipe_v_waits_no_longer_than_its_table_says(p, forward, grad, weight, extra):
    # DualPipe's README, with PP stages on PP / 2 = p ranks: (PP/2 - 1)(F&B + B - 3W), where a
    # pair F&B takes its parts' time when nothing overlaps; for W <= F <= I, as in Transformers.
    weight, forward, grad = sorted((weight, forward, grad))
    timeline = simulate(build_plan("dualpipev", p, 2 * p + extra, 2), Costs(forward, grad, weight))
    table = (p - 1) * (forward + 2 * (grad + weight) - 3 * weight)
    assert min(timeline.makespan - timeline.busy(rank) for rank in range(p)) <= table + 1e-9


@pytest.mark.parametrize("p", [2, 4, 8])
def test_schedules_rank_as_published(p):
    # One rank's work on a micro-batch is 3 in every schedule: a chunk of v takes 1/v of it.
    def idle(schedule, v=1):
        timeline = simulate(build_plan(schedule, p, 4 * p, v), Costs(1 / v, 1 / v, 1 / v))
        return timeline.makespan - timeline.busy(0)

    assert idle("zero_bubble") == pytest.approx(idle("1f1b") / 3)
    assert idle("zbv", 2) <= idle("1f1b") / 6 + 1e-9
    assert idle("dualpipev", 2) <= idle("1f1b") / 6 + 1e-9
    assert idle("interleaved", 2) == pytest.approx(idle("1f1b") / 2)


@pytest.mark.parametrize("p", RANKS)
def test_activations_alive_are_those_of_the_papers(p):
    m = 4 * p
    assert peak_alive(build_plan("gpipe", p, m)) == [m] * p
    assert peak_alive(build_plan("1f1b", p, m)) == [p - r for r in range(p)]
    assert peak_alive(build_plan("zero_bubble", p, m)) == [p] * p
    assert peak_alive(build_plan("zbv", p, m, 2)) == [p] * p
    assert peak_alive(build_plan("dualpipev", p, m, 2)) == [Fraction(2 * p + 1, 2)] * p
    interleaved = [Fraction(p + 2 * (p - r - 1) + 1, 2) for r in range(p)]
    assert peak_alive(build_plan("interleaved", p, m, 2)) == interleaved


# ---------------------------------------------------------------- another generator


def torchs_order(cls, rank, pp, m, v):
    """The compute actions of torch's own generator, B for the pairs that it overlaps."""
    from torch.distributed.pipelining import schedules as torch_schedules

    sizes = SimpleNamespace(
        pp_group_size=pp,
        _n_microbatches=m,
        n_local_stages=v,
        num_stages=pp * v,
        number_of_rounds=max(1, m // pp),
        microbatches_per_round=m // max(1, m // pp),
    )
    actions = getattr(torch_schedules, cls)._calculate_single_rank_operations(sizes, rank)
    flat = []
    for action in actions:
        flat += (action.sub_actions or [action]) if action is not None else []
    return [(a.computation_type.value, a.stage_index, a.microbatch_index) for a in flat]


@pytest.mark.parametrize(
    "schedule, cls, v",
    [
        ("interleaved", "ScheduleInterleaved1F1B", 2),
        ("zero_bubble", "ScheduleInterleavedZeroBubble", 1),
        ("zero_bubble", "ScheduleInterleavedZeroBubble", 2),
        ("zbv", "ScheduleZBVZeroBubble", 2),
        ("dualpipev", "ScheduleDualPipeV", 2),
    ],
)
@pytest.mark.parametrize("pp, m", [(2, 4), (2, 8), (4, 8), (4, 12), (8, 16)])
def test_orders_are_those_of_torchs_generators(schedule, cls, v, pp, m, monkeypatch):
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    plan = build_plan(schedule, pp, m, v)
    for rank, order in enumerate(plan.orders):
        assert [a[:3] for a in order] == torchs_order(cls, rank, pp, m, v)


# ---------------------------------------------------------------- what is not a plan


def changed(plan, rank, order):
    orders = list(plan.orders)
    orders[rank] = tuple(order)
    return replace(plan, orders=tuple(orders))


def test_a_broken_plan_is_refused_in_words():
    plan = build_plan("zero_bubble", 2, 4)
    order = list(plan.orders[1])
    first_w = next(i for i, action in enumerate(order) if action.kind == "W")
    without = order[:first_w] + order[first_w + 1 :]
    with pytest.raises(ValueError, match="W0 of stage 1 must run once, got 0 times"):
        validate(changed(plan, 1, without))
    with pytest.raises(ValueError, match="F0 of stage 1 must run once, got 2 times"):
        validate(changed(plan, 1, [order[0], *order]))
    with pytest.raises(ValueError, match="F9 of stage 1 must run never, got 1 times"):
        validate(changed(plan, 1, [*order, Action("F", 1, 9, 0)]))
    with pytest.raises(ValueError, match="rank 0 must hold its stages, got F0 of stage 1"):
        validate(changed(plan, 0, [*plan.orders[0], order[0]]))
    with pytest.raises(DeadlockError, match="rank 0 at I0 of stage 0; rank 1 at W0 of stage 1"):
        validate(changed(plan, 1, [order[first_w], *without]))
    hungry = build_plan("gpipe", 2, 4)
    with pytest.raises(ValueError, match="rank 0 must keep at most 2 micro-batches alive"):
        validate(replace(hungry, schedule="1f1b"))
    assert most_alive(hungry, 0) == 4


def test_ranks_that_wait_for_each_other_are_found():
    plan = build_plan("1f1b", 2, 2)
    forward = [action for action in plan.orders[0] if action.kind == "F"]
    backward = [action for action in plan.orders[0] if action.kind == "B"]
    with pytest.raises(DeadlockError, match="rank 0 at B0 of stage 0; rank 1 at F0 of stage 1"):
        simulate(changed(plan, 0, backward + forward))


@pytest.mark.parametrize(
    "size, words",
    [
        (("2f2b", 2, 4, 1), "schedule must be one of gpipe"),
        (("1f1b", 0, 4, 1), "pp and num_microbatches must be positive"),
        (("1f1b", 2, 4, 2), "chunks 1 with schedule 1f1b, got 2, 4 and 2"),
        (("zbv", 2, 4, 1), "chunks 2 with schedule zbv"),
        (("interleaved", 2, 3, 2), "must be a multiple of pp = 2"),
        (("dualpipev", 2, 3, 2), "must be at least 4 with schedule dualpipev"),
    ],
)
def test_sizes_that_a_schedule_does_not_run_are_refused(size, words):
    with pytest.raises(ValueError, match=words):
        build_plan(*size)


# ---------------------------------------------------------------- placement


def test_a_v_goes_down_and_up_again():
    layout = Layout(pp=3, schedule="zbv")
    assert layout.num_stages == 6
    assert [layout.stage_owner(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [layout.stages_of(rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]


@given(sizes())
@settings(max_examples=50, deadline=None)
def test_every_stage_has_the_owner_that_holds_it(size):
    schedule, pp, _, chunks = size
    layout = replace(Layout(pp=pp, virtual_stages=chunks), schedule=schedule)
    held = {stage: rank for rank in range(pp) for stage in layout.stages_of(rank)}
    assert sorted(held) == list(range(layout.num_stages))
    for stage, rank in held.items():
        assert layout.stage_owner(stage) == rank
        assert pp == 1 or owner_of(schedule, pp, stage) == rank


def test_one_rank_has_one_stage_whatever_the_schedule():
    assert [replace(Layout(), schedule=schedule).num_stages for schedule in SCHEDULES] == [1] * len(
        SCHEDULES
    )
