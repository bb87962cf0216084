"""train.optimizer = onebit_adam: stages, layouts, checkpoints of any layout, what is reported."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from configs import assert_ways_out, config_of, names

from mcp_parallel.checkpoint import CheckpointError
from mcp_parallel.config import Config, ParallelConfig
from mcp_parallel.layout import Layout
from mcp_parallel.monitor.monitor import Monitor
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.snapshot import load_step, save_step
from mcp_parallel.step import StepResult, TrainingStep

LR, BATCH, SEQUENCE, FREEZE = 1e-2, 8, 16, 3


def configure(layout, *, optimizer="onebit_adam", tied=True, freeze=FREEZE, layers=2):
    base = Config.from_mapping(
        {
            "model": {
                "preset": None,
                "num_layers": layers,
                "hidden_size": 32,
                "num_heads": 4,
                "num_kv_heads": 4,
                "ffn_size": 48,
                "vocab_size": 257,
                "seq_len": SEQUENCE,
                "tie_embeddings": tied,
            }
        }
    )
    train = replace(
        base.train,
        steps=20,
        warmup_steps=1,
        global_batch_size=BATCH,
        micro_batch_size=BATCH // layout.dp // (2 * layout.pp if layout.pp > 1 else 1),
        optimizer=optimizer,
        freeze_step=freeze if optimizer == "onebit_adam" else None,
    )
    return replace(base, parallel=ParallelConfig(**asdict(layout)), train=train)


def batch(index, rows):
    """Counting up by a step that each row keeps: something to learn."""
    generator = np.random.default_rng(index)
    starts, strides = generator.integers(0, 257, (BATCH, 1)), generator.integers(1, 4, (BATCH, 1))
    tokens = (starts + strides * np.arange(SEQUENCE + 1)) % 257
    mine = torch.from_numpy(tokens[rows.start : rows.stop])
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


def make_step(layout, **options):
    mesh = build_mesh(layout, torch.device("cpu"))
    return TrainingStep(configure(layout, **options), mesh)


def advance(step, first, last):
    # The automatic switch waits for gradients that hardly change: weights that hardly move.
    is_automatic = (
        step.config.train.optimizer == "onebit_adam" and not step.config.train.freeze_step
    )
    lr = 1e-5 if is_automatic else LR
    return [step(*batch(index, step.rows()), lr) for index in range(first, last)]


def weights(step):
    return {shard.name: shard.local.clone() for shard in step.shards}


def train(rank, world, layout, options, steps):
    step = make_step(layout, **options)
    results = advance(step, 0, steps)
    report = [(r.loss, r.grad_norm, r.wire_bytes, r.uncompressed_bytes) for r in results]
    return report, weights(step), step.mesh.coordinate


def test_stage_1_is_the_trainers_adamw(ranks):
    layout = Layout(dp=2, zero=1)
    ours = ranks.run(train, layout, {"freeze": 99}, 6, ranks=2)
    adamw = ranks.run(train, Layout(dp=2), {"optimizer": "adamw"}, 6, ranks=2)
    for (report, params, _), (expected, wanted, _) in zip(ours, adamw, strict=True):
        assert [row[:2] for row in report] == [row[:2] for row in expected]
        assert all(row[2:] == (None, None) for row in expected)
        assert all(torch.equal(params[name], wanted[name]) for name in wanted)


LAYOUTS = (
    Layout(dp=4, zero=1),
    Layout(dp=2, tp=2),
    Layout(dp=2, pp=2, zero=1),
    *(
        pytest.param(layout, marks=pytest.mark.slow)
        for layout in (
            Layout(dp=4),
            Layout(dp=2, tp=2, zero=1),
            Layout(dp=2, pp=2),
            Layout(tp=2, pp=2),
        )
    ),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_trains_and_replicas_stay_equal(ranks, layout):
    results = ranks.run(train, layout, {}, 12)
    report = results[0][0]
    losses = [row[0] for row in report]
    assert losses[-1] < 0.95 * losses[FREEZE]  # stage 2 learns
    held = {}
    for other, values, at in results:
        assert [row[:2] for row in other] == [row[:2] for row in report]
        for name, value in values.items():
            # Ranks of one tp and pp place hold the same; a norm's weight is the same on all of tp.
            tp = None if value.dim() == 1 else at.tp
            first = held.setdefault((name, at.pp, tp), value)
            assert torch.equal(first, value), name
    if layout.pp > 1 and layout.tp == 1:  # the two copies of the tied embedding
        assert torch.equal(held["embed", 0, 0], held["embed", 1, 0])
    for _, _, sent, plain in report[:FREEZE]:
        assert sent == plain
    for _, _, sent, plain in report[FREEZE:]:
        # ZeRO-1 sends parameters too, here with a padding that outweighs them.
        assert sent < plain or layout.dp == 1 or layout.zero == 1


def test_blocks_make_the_result_independent_of_pipeline_and_zero(ranks):
    """Codes are a block's own affair: other buckets and owners give the same losses."""
    untied = {"tied": False}
    expected = [row[0] for row in ranks.run(train, Layout(dp=2), untied, 8, ranks=2)[0][0]]
    for layout in (Layout(dp=2, zero=1), Layout(dp=2, pp=2)):
        report = ranks.run(train, layout, untied, 8, ranks=layout.world_size)[0][0]
        # A sign of a sum near zero may differ between micro-batchings, and with it one element.
        np.testing.assert_allclose([row[0] for row in report], expected, rtol=2e-3)


def train_and_resume_in_a_v(rank, world, folder, layout):
    """Losses, whether the copies of the tied embedding here stay equal, losses after a resume."""
    options = {"layers": 4}
    step = make_step(layout, **options)
    losses = [r.loss for r in advance(step, 0, 6)]
    save_step(Path(folder), 6, step)
    losses += [r.loss for r in advance(step, 6, 9)]
    copies = [shard.local.clone() for shard in step.shards if shard.name == "embed"]
    report, _ = resume(rank, world, folder, layout, 6, 9, options)
    return losses, copies, [loss for loss, _ in report]


def test_a_v_trains_both_copies_of_a_tied_embedding_as_one(ranks, tmp_path):
    v, plain = (Layout(dp=2, pp=2, schedule=schedule) for schedule in ("zbv", "zero_bubble"))
    expected = ranks.run(train, plain, {"layers": 4}, 9)
    wanted = [row[0] for row in expected[0][0]]
    embedding = next(values["embed"] for _, values, at in expected if at.pp == 0)
    start = make_step(Layout(), layers=4)
    (before,) = (shard.local for shard in start.shards if shard.name == "embed")
    holders = 0
    for losses, copies, resumed in ranks.run(train_and_resume_in_a_v, str(tmp_path), v):
        # A sign of a sum near zero may differ between pipelines, and with it one element.
        np.testing.assert_allclose(losses, wanted, rtol=2e-3)
        assert resumed == losses[6:]
        if copies:
            first, last = copies
            assert torch.equal(first, last)
            moved = (embedding - before).norm()
            assert (first - embedding).norm() < 0.1 * moved
            holders += 1
    assert holders == 2  # the first rank of both pipelines


# --- checkpoints --------------------------------------------------------------------------------


def save_and_go_on(rank, world, folder, layout, stop, steps, options):
    step = make_step(layout, **options)
    advance(step, 0, stop)
    save_step(Path(folder), stop, step)
    report = [(r.loss, r.grad_norm) for r in advance(step, stop, steps)]
    return report, weights(step), step.optimizer.adam.switch_step


def resume(rank, world, folder, layout, stop, steps, options):
    step = make_step(layout, **options)
    assert load_step(Path(folder) / "checkpoints" / f"step_{stop:08d}", step) == stop
    report = [(r.loss, r.grad_norm) for r in advance(step, stop, steps)]
    return report, weights(step)


@pytest.mark.parametrize(
    "layout, stop",
    [
        *((Layout(dp=2), stop) for stop in (2, FREEZE)),
        (Layout(dp=2, pp=2, zero=1), 6),
        *(
            pytest.param(layout, stop, marks=pytest.mark.slow)
            for layout, stops in {
                Layout(dp=2): (6,),
                Layout(dp=4, zero=1): (2, FREEZE, 6),
                Layout(dp=2, pp=2, zero=1): (2, FREEZE),
            }.items()
            for stop in stops
        ),
    ],
    ids=str,
)
def test_resume_at_the_same_layout_is_bit_exact(ranks, tmp_path, layout, stop):
    """In stage 1, between the switch and the first codes, and in stage 2."""
    args = (str(tmp_path), layout, stop, 9, {})
    whole = ranks.run(save_and_go_on, *args, ranks=layout.world_size)
    resumed = ranks.run(resume, *args, ranks=layout.world_size)
    for (report, params), (expected, wanted, _) in zip(resumed, whole, strict=True):
        assert report == expected
        assert all(torch.equal(params[name], wanted[name]) for name in wanted)


def save_what_was_watched(rank, world, folder, layout):
    """Train under the automatic switch, save; this rank's place and what its rule has seen."""
    step = make_step(layout, freeze=None)
    advance(step, 0, 20)  # the rule looks at each twentieth
    save_step(Path(folder), 20, step)
    return watched(step)


def load_what_was_watched(rank, world, folder, layout):
    step = make_step(layout, freeze=None)
    assert load_step(Path(folder) / "checkpoints" / "step_00000020", step) == 20
    return watched(step)


def watched(step):
    rule = step.optimizer.adam._rule
    place = step.mesh.coordinate
    return (place.pp, place.dp, place.tp), (rule.vote, list(rule.norms), list(rule.rates))


def test_what_the_switch_has_seen_goes_to_its_place_in_either_order_of_ranks(ranks, tmp_path):
    old = Layout(dp=2, pp=2)
    other = replace(old, rank_order="pp-dp-cp-tp")
    saved = dict(ranks.run(save_what_was_watched, str(tmp_path), old))
    assert len({str(seen) for _, seen in sorted(saved.items())}) > 1  # stages see different norms
    for layout in (old, other):
        assert dict(ranks.run(load_what_was_watched, str(tmp_path), layout)) == saved


@pytest.mark.slow
def test_resume_under_the_automatic_switch(ranks, tmp_path):
    """What the rule has seen comes along, so the switch is at the step where it would have been."""
    args = (str(tmp_path), Layout(dp=2), 30, 90, {"freeze": None})
    whole = ranks.run(save_and_go_on, *args, ranks=2)
    assert whole[0][2] is not None
    assert whole[0][2] > 30
    resumed = ranks.run(resume, *args, ranks=2)
    assert resumed[0][0] == whole[0][0]


@pytest.mark.parametrize(
    "stop",
    [pytest.param(2, marks=pytest.mark.slow), pytest.param(FREEZE, marks=pytest.mark.slow), 6],
)
@pytest.mark.parametrize(
    "old, new",
    [
        (Layout(dp=2), Layout(dp=4, zero=1)),
        (Layout(dp=4, zero=1), Layout()),
        (Layout(dp=2, tp=2), Layout(dp=2, pp=2)),
        (Layout(), Layout(dp=2, tp=2, zero=1)),
    ],
    ids=str,
)
def test_resume_at_another_layout(ranks, tmp_path, old, new, stop):
    """The first loss is that of the same weights; what follows is close."""
    whole = ranks.run(save_and_go_on, str(tmp_path), old, stop, stop + 3, {}, ranks=old.world_size)[
        0
    ][0]
    resumed = ranks.run(resume, str(tmp_path), new, stop, stop + 3, {}, ranks=new.world_size)
    report = resumed[0][0]
    assert all(other == report for other, _ in resumed)
    losses, expected = ([row[0] for row in rows] for rows in (report, whole))
    np.testing.assert_allclose(losses[:1], expected[:1], rtol=1e-5)
    np.testing.assert_allclose(losses, expected, rtol=5e-2)


def test_adamw_and_onebit_adam_share_stage_1(ranks, tmp_path):
    layout, adamw = Layout(dp=2), {"optimizer": "adamw"}
    args = (str(tmp_path), layout, 2)
    ranks.run(save_only, *args, adamw, ranks=2)
    resumed = ranks.run(resume, *args, 3, {}, ranks=2)
    plain = ranks.run(resume, *args, 3, adamw, ranks=2)
    assert resumed[0][0] == plain[0][0]
    one = Layout()
    step = make_step(one)
    advance(step, 0, FREEZE)
    save_step(tmp_path / "frozen", FREEZE, step)
    with pytest.raises(CheckpointError, match=r"train.optimizer must be onebit_adam .*got adamw"):
        resume(0, 1, str(tmp_path / "frozen"), one, FREEZE, FREEZE, adamw)


def save_only(rank, world, folder, layout, stop, options):
    step = make_step(layout, **options)
    advance(step, 0, stop)
    save_step(Path(folder), stop, step)


# --- a step that is not finite ------------------------------------------------------------------


def diverge(rank, world, layout):
    step = make_step(layout)
    advance(step, 0, 5)
    before = weights(step)
    error = step.optimizer.adam.buckets[0].worker_error.clone()
    if rank == 1:
        with torch.no_grad():
            step.shards[0].parameter[0, 0] = torch.nan
    before[step.shards[0].name] = step.shards[0].local.clone()
    result = step(*batch(5, step.rows()), LR)
    after = weights(step)
    same = all(torch.equal(after[n].nan_to_num(), before[n].nan_to_num()) for n in before)
    return result.is_finite, same, torch.equal(error, step.optimizer.adam.buckets[0].worker_error)


def test_a_nan_on_one_rank_updates_nothing_anywhere(ranks):
    assert ranks.run(diverge, Layout(dp=2), ranks=2) == [(False, True, True)] * 2


# --- what is reported, what is refused ----------------------------------------------------------


def test_metrics_hold_bytes_and_ratio(tmp_path):
    monitor = Monitor(config_of(monitor__every=1), tmp_path, start_step=0, is_main=True)
    result = StepResult(1.0, 1.0, 10, False)
    monitor.record(0, result, 1e-3, 0.1)
    monitor.record(1, replace(result, wire_bytes=100, uncompressed_bytes=3100), 1e-3, 0.1)
    monitor.close(0)
    plain, onebit = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert "wire_bytes" not in plain
    assert (onebit["wire_bytes"], onebit["compression_ratio"]) == (100, 31.0)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, []),
        ({"parallel__zero": 1, "train__freeze_step": 50}, []),
        ({"parallel__zero": 2}, ["onebit_adam zero"]),
        ({"parallel__zero": 3}, ["onebit_adam zero"]),
        ({"train__precision": "fp64"}, ["onebit_adam precision"]),
        ({"train__precision": "fp64", "train__freeze_step": 100}, ["onebit_adam precision"]),
        ({"train__precision": "fp64", "train__freeze_step": 10**6}, []),
        ({"train__freeze_step": 19}, ["onebit_adam freeze_step"]),
        ({"train__freeze_step": 0, "train__warmup_steps": 0}, ["onebit_adam freeze_step"]),
        ({"train__freeze_step": 1, "train__warmup_steps": 0}, []),
    ],
)
def test_rules(changes, expected):
    config = config_of(train__optimizer="onebit_adam", **changes)
    assert names(config) == expected
    assert_ways_out(config)
