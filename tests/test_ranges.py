"""Judgements alone: what is in range, what is out, what is told again, and what a resume drops."""

from __future__ import annotations

import json
import math
import random
import statistics
from dataclasses import replace

import pytest

from mcp_parallel.config import Config
from mcp_parallel.monitor import peak, ranges
from mcp_parallel.monitor.fields import VERDICT_KEYS
from mcp_parallel.monitor.progress import Progress
from mcp_parallel.monitor.stragglers import Stragglers
from mcp_parallel.monitor.throughput import flops_per_sample, flops_per_step, stage_flops
from mcp_parallel.monitor.verdicts import Finding, Verdicts
from mcp_parallel.monitor.windows import FEWEST, RECENT, WINDOW, Window

# ---------------------------------------------------------------- windows


def filled(values):
    window = Window()
    for value in values:
        window.add(value)
    return window


def test_a_robust_z_is_deviations_from_the_median_and_outliers_do_not_move_it():
    values = [math.sin(7 * i) for i in range(WINDOW)]
    plain = filled(values)
    ordered = sorted(values)
    middle = (ordered[24] + ordered[25]) / 2
    away = sorted(abs(value - middle) for value in values)
    spread = 1.4826 * (away[24] + away[25]) / 2
    assert plain.robust_z(middle + 3 * spread) == pytest.approx(3)
    spoilt = filled([1e6 if i % 10 == 0 else value for i, value in enumerate(values)])
    assert spoilt.robust_z(middle + 3 * spread) == pytest.approx(3, rel=0.35)
    assert plain.robust_z(math.nan) is None
    assert filled([2.0] * WINDOW).robust_z(2.01) == pytest.approx(0.5)  # not infinite


def test_a_window_has_the_medians_of_the_values_that_are_left_in_it():
    generator = random.Random(2)
    values, window = [], Window()
    for _ in range(3 * WINDOW):
        values.append(generator.choice([0.0, 1.0, generator.uniform(-1, 1)]))  # many are equal
        window.add(values[-1])
        if len(values) >= FEWEST:
            kept = values[-WINDOW:]
            assert window.median() == statistics.median(kept)
            assert window.recent_median() == statistics.median(kept[-RECENT:])


def test_a_window_says_nothing_before_it_knows_enough_and_forgets():
    window = filled([1.0] * (FEWEST - 1))
    assert window.median() is window.robust_z(5.0) is window.recent_median() is None
    window.add(math.inf)  # is not counted
    assert window.median() is None
    window.add(1.0)
    assert window.median() == 1.0
    assert not window.is_full
    for _ in range(WINDOW):
        window.add(3.0)
    assert (window.median(), window.is_full, window.mean) == (3.0, True, 3.0)


# ---------------------------------------------------------------- ranges

FLAT = {"embed": 1e-3, "blocks.0": 1e-3, "blocks.1": 2e-3, "norm": 1e-3}


@pytest.mark.parametrize(
    "judge, healthy, faulty, kind, where",
    [
        (ranges.loss_spike, (2.5, 5.9, 2.4), (9.0, 6.1, 2.4), "loss_spike", None),
        (ranges.gradient_explodes, (9.9, 1.0), (10.1, 1.0), "gradient_explodes", None),
        (ranges.always_clipped, (1.0, 9.0, 1.0), (1.0, 11.0, 1.0), "always_clipped", None),
        (ranges.always_clipped, (0.9, 11.0, 1.0), (0.96, 11.0, 1.0), "always_clipped", None),
        (ranges.loss_scale_falls, (0.1,), (0.3,), "loss_scale_falls", None),
        (
            ranges.gradient_vanishes,
            (FLAT,),
            (FLAT | {"blocks.0": 1e-8},),
            "gradient_vanishes",
            "blocks.0",
        ),
        (
            ranges.update_too_large,
            (FLAT | {"embed": 0.09}, 0.1),
            (FLAT | {"embed": 0.11}, 0.1),
            "update_too_large",
            "embed",
        ),
        (
            ranges.update_too_large,
            (FLAT | {"embed": 0.04}, 0.9),
            (FLAT | {"embed": 0.06}, 0.9),
            "update_too_large",
            "embed",
        ),
        (
            ranges.update_too_small,
            (FLAT, 1e-3),
            (FLAT | {"norm": 1e-7}, 1e-3),
            "update_too_small",
            "norm",
        ),
        (
            ranges.variance_by_depth,
            ({"blocks.0": 1.0, "blocks.1": 29.0, "blocks.2": 50.0},),
            ({"blocks.0": 1.0, "blocks.1": 31.0, "blocks.2": 50.0},),
            "variance_grows",
            "blocks.1",
        ),
        (
            ranges.variance_by_depth,
            ({"blocks.0": 1.0, "blocks.1": 7.0, "blocks.2": 59.0},),
            ({"blocks.0": 1.0, "blocks.1": 8.0, "blocks.2": 61.0},),
            "variance_grows",
            "blocks.2",
        ),
        (
            ranges.variance_by_depth,
            ({"blocks.0": 1.0, "blocks.1": 0.04},),
            ({"blocks.0": 1.0, "blocks.1": 0.03},),
            "variance_collapses",
            "blocks.1",
        ),
        (
            ranges.dead_units,
            ({"blocks.0": 0.01, "blocks.1": 0.0},),
            ({"blocks.0": 0.01, "blocks.1": 0.02},),
            "dead_units",
            "blocks.1",
        ),
    ],
)
def test_a_range_ends_where_it_is_said_to(judge, healthy, faulty, kind, where):
    assert judge(*healthy) is None
    finding = judge(*faulty)
    assert (finding.kind, finding.where) == (kind, where)
    text = finding.text
    assert text.isascii()
    assert "\n" not in text
    assert f"; likely {finding.cause}; {finding.advice}" in text
    assert finding.low is not None or finding.high is not None


def test_nothing_is_said_before_there_is_enough_to_say_it():
    assert ranges.loss_spike(9.0, None, None) is None
    assert ranges.gradient_explodes(None, None) is None
    assert ranges.always_clipped(1.0, 11.0, 0.0) is None  # clipping is off
    assert ranges.variance_by_depth({}) is None
    assert ranges.dead_units({}) is None


# ---------------------------------------------------------------- verdicts

SPIKE = Finding(kind="loss_spike", what="a", cause="b", advice="c", value=math.inf, high=6.0)
SLOW = [replace(SPIKE, kind="straggler", where=f"rank {rank}", host="n") for rank in range(2)]


def steps_of(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_verdict_is_told_once_until_it_was_gone_for_three_looks(tmp_path):
    path = tmp_path / "verdicts.jsonl"
    verdicts = Verdicts(path)
    found = [[SPIKE], [SPIKE], [], [SPIKE], [], [], [], [SPIKE]]
    told = [verdicts.judge(step, ["loss_spike"], f) for step, f in enumerate(found)]
    assert [step for step, new in enumerate(told) if new] == steps_of(path) == [0, 7]
    for step in range(8, 20):  # what is not looked for is not gone
        verdicts.judge(step, ["straggler"], [])
    assert verdicts.judge(20, ["loss_spike"], [SPIKE]) == []
    row = json.loads(path.read_text().splitlines()[0])
    assert set(row) == set(VERDICT_KEYS)
    assert (row["value"], row["high"], row["severity"]) == (None, 6.0, "warning")


def test_two_stragglers_are_two_verdicts_and_two_layers_are_one(tmp_path):
    verdicts = Verdicts(tmp_path / "verdicts.jsonl")
    assert len(verdicts.judge(1, [], SLOW)) == 2
    layers = [replace(SPIKE, kind="dead_units", where=f"blocks.{i}") for i in range(2)]
    assert verdicts.judge(2, [], layers[:1])
    assert verdicts.judge(3, [], layers[1:]) == []


def test_a_resumed_run_drops_the_verdicts_of_steps_it_makes_again(tmp_path):
    path = tmp_path / "verdicts.jsonl"
    first = Verdicts(path)
    first.judge(10, [], [SPIKE])
    first.judge(30, [], SLOW)
    Verdicts(path, start_step=20).judge(25, [], [SPIKE])
    assert steps_of(path) == [10, 25]


def test_a_verdict_is_a_line_among_those_of_progress(capsys):
    progress = Progress(3)
    progress.say("step 2: [bold] is no markup")
    progress.close("end")
    assert capsys.readouterr().out == "step 2: [bold] is no markup\nend\n"


# ---------------------------------------------------------------- stragglers


def judge_steps(layout, make, steps=200, **monitor):
    config = Config().with_overrides(
        [f"parallel.{k}={v}" for k, v in layout.items()]
        + [f"monitor.{k}={v}" for k, v in monitor.items()]
    )
    world = math.prod(layout.values())
    watch = Stragglers(config, [f"host{rank}" for rank in range(world)])
    named = {}
    for step in range(steps):
        for finding in watch.add(make(step, world)):
            named.setdefault(finding.where, (step, finding))
    return named


def test_a_rank_twice_as_slow_is_named_within_the_steps_asked_for():
    generator = random.Random(0)

    def times(step, world):
        noisy = [0.1 * generator.lognormvariate(0, 0.05) for _ in range(world)]
        return [t * (2.0 if rank == 5 and step >= 50 else 1.0) for rank, t in enumerate(noisy)]

    named = judge_steps({"dp": 4, "tp": 2}, times)
    assert set(named) == {"rank 5"}
    step, finding = named["rank 5"]
    assert 50 < step < 70
    assert finding.host == "host5"
    assert finding.value == pytest.approx(2.0, rel=0.1)
    assert "rank 5 on host host5" in finding.text


@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 4, "tp": 2}, {"pp": 2}, {"dp": 2, "pp": 4}])
def test_noise_names_nobody(layout):
    """A loaded machine: each step every rank has an even chance to take twice as long."""
    generator = random.Random(1)

    def times(step, world):
        return [
            0.1 * generator.choice([1.0, 2.0]) * generator.uniform(0.9, 1.1) for _ in range(world)
        ]

    assert judge_steps(layout, times, steps=2000) == {}


def test_stages_that_differ_are_held_against_their_own_work():
    config = Config().with_overrides(["parallel.pp=2", "parallel.stage_split=3,1"])
    works = [stage_flops(config, pp) for pp in range(2)]
    assert works[0] > 2 * works[1]  # three blocks against one and a head

    def judged(slow):
        watch = Stragglers(config, ["a", "b"])
        found = []
        for _ in range(30):
            found += watch.add([works[0] * 1e-9 * slow, works[1] * 1e-9])
        return {finding.where for finding in found}

    assert judged(1.0) == set()
    assert judged(4.0) == {"rank 0"}


# ---------------------------------------------------------------- throughput


def test_stages_add_up_to_the_step():
    for overrides in (["parallel.pp=4"], ["parallel.pp=2", "parallel.schedule=zbv"]):
        config = Config().with_overrides(overrides)
        total = sum(stage_flops(config, pp) for pp in range(config.parallel.pp))
        assert total * config.train.global_batch_size == pytest.approx(flops_per_step(config))


def test_an_image_is_counted_product_by_product():
    model = Config.from_mapping({"model": {"preset": "vit-digits"}}).model
    seq, hidden, ffn = model.seq_len, model.hidden_size, model.ffn_size
    kv = model.num_kv_heads * hidden // model.num_heads
    block = hidden * (hidden + 2 * kv + hidden) + 2 * hidden * ffn
    patch = hidden * model.patch_size**2 * model.channels
    products = seq * (model.num_layers * block + patch) + hidden * model.vocab_size
    attention = model.num_layers * 2 * seq * seq * hidden
    assert flops_per_sample(model) == pytest.approx(6 * (products + attention))


@pytest.mark.parametrize(
    "name, precision, expected",
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA H200", "fp16", 989.4),
        ("NVIDIA GB200", "bf16", 2500.0),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA H200", "fp64", None),
        ("NVIDIA GeForce RTX 4090", "bf16", None),
    ],
)
def test_gpus_are_known_by_name(name, precision, expected):
    assert peak.of_gpu(name, precision) == expected
