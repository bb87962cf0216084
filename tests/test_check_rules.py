"""The rules against their statement: refused exactly when it cannot run, and all advice works."""

from __future__ import annotations

import math

import pytest
from configs import applied, assert_ways_out, config_of, names
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from mcp_parallel.check import find_problems
from mcp_parallel.rules.layout import legal_layouts_near
from mcp_parallel.rules.problem import divisors, nearest, nearest_multiples

# --- rules against their statement ---------------------------------------------------------------

small = st.integers(1, 12)
PLAIN = ["gpipe", "1f1b", "zero_bubble"]
ROUNDS = ["interleaved", "zero_bubble"]
V_SHAPED = ["zbv", "dualpipev"]
SCHEDULES = [*PLAIN, "interleaved", *V_SHAPED]
ANYTHING = {
    "model__num_layers": small,
    "model__hidden_size": st.sampled_from([24, 48, 96, 100, 120, 128]),
    "model__num_heads": small,
    "model__num_kv_heads": small,
    "model__ffn_size": st.sampled_from([1, 3, 9, 352]),
    "model__vocab_size": st.sampled_from([256, 257, 1000]),
    "model__seq_len": st.sampled_from([120, 126, 127, 128]),
    "parallel__dp": small,
    "parallel__tp": small,
    "parallel__pp": small,
    "parallel__virtual_stages": st.integers(1, 4),
    "parallel__schedule": st.sampled_from(SCHEDULES),
    "parallel__sequence_parallel": st.booleans(),
    "parallel__zero": st.integers(0, 3),
    "parallel__dp_replicate": st.integers(1, 4),
    "train__global_batch_size": st.integers(1, 100),
    "train__micro_batch_size": small,
}


@st.composite
def layouts(draw):
    """Most of them right but for one or two keys, some of them wild."""
    dp, pp, micro = draw(small), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    kv_heads = draw(st.sampled_from([1, 2, 3, 4]))
    heads = kv_heads * draw(st.integers(1, 3))
    virtual = draw(st.integers(2, 3)) if pp > 1 and draw(st.booleans()) else 1
    kinds = ROUNDS if virtual > 1 else PLAIN
    if virtual == 2 or (virtual == 1 and draw(st.booleans())):
        kinds = [*kinds, *V_SHAPED]
    right = {
        "model__num_layers": pp * max(2, virtual) + draw(st.integers(0, 3)),
        "model__hidden_size": heads * draw(st.sampled_from([2, 6, 16])),
        "model__num_heads": heads,
        "model__num_kv_heads": kv_heads,
        "model__seq_len": 120,
        "parallel__dp": dp,
        "parallel__tp": draw(st.sampled_from(divisors(kv_heads))),
        "parallel__pp": pp,
        "parallel__virtual_stages": virtual,
        "parallel__schedule": draw(st.sampled_from(kinds)),
        "train__global_batch_size": dp * micro * pp * draw(st.integers(1, 4)),
        "train__micro_batch_size": micro,
    }
    keys = draw(st.lists(st.sampled_from(sorted(ANYTHING)), max_size=4, unique=True))
    return config_of(**{**right, **{key: draw(ANYTHING[key]) for key in keys}})


def can_run(config):
    """The rules as the parts that run them state them, without a word on how to mend them."""
    model, parallel, train = config.model, config.parallel, config.train
    tp, pp, virtual = parallel.tp, parallel.pp, parallel.virtual_stages
    unit = parallel.dp * train.micro_batch_size
    count = train.global_batch_size / unit
    schedule = parallel.schedule
    is_v = schedule in V_SHAPED and pp > 1
    in_rounds = pp > 1 and schedule in ROUNDS and virtual > 1
    return all(
        (
            model.num_heads % model.num_kv_heads == 0,
            model.hidden_size % model.num_heads == 0,
            model.hidden_size // model.num_heads % 2 == 0,
            model.num_heads % tp == 0,
            model.num_kv_heads % tp == 0,
            pp * (2 if is_v else virtual) <= model.num_layers,
            virtual == 1 or in_rounds or (is_v and virtual == 2),
            virtual > 1 or schedule != "interleaved" or pp == 1,
            count == int(count),
            count >= pp or schedule in ("gpipe", "interleaved"),
            count >= 2 * pp or schedule != "dualpipev" or pp == 1,
            count % pp == 0 or not in_rounds,
            parallel.dp % parallel.dp_replicate == 0,
            parallel.dp_replicate == 1 or parallel.zero > 0,
            # The last rank starts behind the others, or holds no weight for ZeRO to share out.
            parallel.zero == 0
            or parallel.dp == parallel.dp_replicate
            or math.ceil(model.ffn_size / tp) * (tp - 1) < model.ffn_size,
        )
    )


@given(config=layouts())
@settings(max_examples=400, deadline=None)
def test_a_config_is_refused_exactly_when_it_cannot_run(config):
    event(f"can run: {can_run(config)}")
    assert (find_problems(config) == []) == can_run(config)


@given(config=layouts())
@settings(max_examples=300, deadline=None)
def test_every_way_out_mends_its_problem(config):
    assert_ways_out(config)


@given(config=layouts(), world_size=st.integers(1, 64))
@settings(max_examples=100, deadline=None)
def test_every_way_out_mends_its_problem_in_a_given_world(config, world_size):
    product = config.parallel.dp * config.parallel.tp * config.parallel.pp
    assert ("world_size" in names(config, world_size)) == (product != world_size)
    assert_ways_out(config, world_size)


@given(config=layouts(), data=st.data())
@settings(max_examples=200, deadline=None)
def test_taking_any_advice_leads_to_a_config_that_runs(config, data):
    for _ in range(12):
        problems = find_problems(config)
        if not problems:
            return
        problem = data.draw(st.sampled_from(problems))
        config = applied(config, data.draw(st.sampled_from(problem.ways)))
    pytest.fail(f"still {[str(problem) for problem in find_problems(config)]}")


@given(world_size=st.integers(1, 256), tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2, 4]))
@settings(deadline=None)
def test_layouts_offered_for_a_world_run_as_they_are(world_size, tp, pp):
    config = config_of(
        parallel__tp=tp, parallel__pp=pp, train__global_batch_size=64, train__micro_batch_size=1
    )
    assume(config.parallel.tp * config.parallel.pp != world_size)
    (problem,) = [p for p in find_problems(config, world_size) if p.name == "world_size"]
    legal_dps = [
        (dp, t, p)
        for t in (1, 2, 4)
        for p in (1, 2, 3, 4)
        if world_size % (t * p) == 0 and 64 % (dp := world_size // (t * p)) == 0 and 64 // dp >= p
    ]
    offered = [tuple(way.values()) for way in problem.ways]
    for way in offered:
        assert math.prod(way) == world_size
    if legal_dps:
        assert set(offered) <= set(legal_dps)
        assert len(offered) == min(3, len(legal_dps))


def test_layouts_nearest_to_the_wanted_one_come_first():
    config = config_of(parallel__tp=4, parallel__pp=2)
    assert legal_layouts_near(config, 16)[0] == {
        "parallel.dp": 2,
        "parallel.tp": 4,
        "parallel.pp": 2,
    }


# --- arithmetic ----------------------------------------------------------------------------------


@given(st.integers(1, 5000))
@settings(deadline=None)
def test_divisors(number):
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def test_nearest_is_by_ratio_and_the_smaller_wins():
    assert nearest([1, 2, 4, 8], 3) == [4, 2, 8, 1]
    assert nearest([8, 2], 4) == [2, 8]


@given(
    unit=st.integers(1, 50),
    target=st.integers(1, 500),
    low=st.integers(1, 300),
    span=st.integers(0, 300),
)
@settings(deadline=None)
def test_nearest_multiples_are_the_nearest(unit, target, low, span):
    every = [value for value in range(low, low + span + 1) if value % unit == 0]
    every.sort(key=lambda value: (abs(value - target), value))
    found = nearest_multiples(unit, target, low, low + span)
    assert found[:2] == every[:2]
