"""Faults planted into real runs are named; clean runs give no verdict."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
import torch
from health_runs import configure, lines, train, verdicts

from mcp_parallel.errors import DIVERGED, OK
from mcp_parallel.layout import Layout
from mcp_parallel.monitor.fields import VERDICT_KEYS, VERDICTS

FAST = {"straggler_steps": 3, "health_every": 2}


def weight(trainer, block, *path):
    """The parameter ``blocks.<block>.<path>`` where this rank has it."""
    for stage in trainer.train_step.stages:
        if str(block) in stage.model.blocks:
            found = stage.model.blocks[str(block)]
            for name in path:
                found = getattr(found, name)
            return getattr(found.weight, "_local_tensor", found.weight)
    return None


@torch.no_grad()
def nan_weight(trainer):
    found = weight(trainer, 2, "attn", "wk")
    if found is not None:
        found[1, 3] = float("nan")


@torch.no_grad()
def huge_weight(trainer):
    found = weight(trainer, 1, "ffn", "w1")
    if found is not None:
        found.mul_(1e37)
        weight(trainer, 1, "ffn", "w3").mul_(1e37)


class NanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float("nan")


def broken_backward(trainer):
    for stage in trainer.train_step.stages:
        if "1" in stage.model.blocks:
            norm = stage.model.blocks["1"].attn_norm
            norm.register_forward_hook(lambda *args: NanBackward.apply(args[2]))


NORM = "blocks.1.attn_norm", "gradient of the input"
NOT_FINITE = {
    # Found without another pass, by looking at the weights.
    "weights dp2": (Layout(dp=2), nan_weight, "blocks.2.attn.wk", "weights"),
    "weights pp2": (Layout(pp=2), nan_weight, "blocks.2.attn.wk", "weights"),
    "weights zero3": (Layout(dp=2, zero=3), nan_weight, "blocks.2.attn.wk", "weights"),
    # 1e37 times a gate of 1e37 is beyond float32: what the last product is given.
    "forward one": (Layout(), huge_weight, "blocks.1.ffn.w2", "input"),
    "forward tp2": (Layout(tp=2), huge_weight, "blocks.1.ffn.w2", "input"),
    "backward pp2": (Layout(pp=2), broken_backward, *NORM),
}


@pytest.mark.parametrize("layout, plant, where, side", NOT_FINITE.values(), ids=NOT_FINITE)
def test_the_first_module_that_is_not_finite_is_named(ranks, tmp_path, layout, plant, where, side):
    config = configure(layout, monitor=FAST)
    results = ranks.run(train, config, tmp_path, plant, ranks=layout.world_size)
    assert set(results) == {DIVERGED}
    [row] = lines(tmp_path, "verdicts.jsonl")
    assert (row["kind"], row["severity"], row["where"]) == ("not_finite", "error", where)
    assert f"in the {side} of {where}" in row["text"]
    assert set(row) == set(VERDICT_KEYS)


def test_full_checkpointing_names_the_same_module(tmp_path):
    config = configure(memory={"activation_checkpointing": "full"})
    assert train(0, 1, config, tmp_path, broken_backward) == DIVERGED
    assert verdicts(tmp_path) == [("not_finite", "blocks.1.attn_norm")]


def test_a_step_that_only_overflowed_once_points_at_the_hardware(tmp_path):
    def flip(trainer):
        totals = trainer.train_step._totals

        def flipped(*args):
            result, switches = totals(*args)
            return replace(result, loss=float("nan")), switches

        trainer.train_step._totals = flipped

    assert train(0, 1, configure(), tmp_path, flip) == DIVERGED
    [row] = lines(tmp_path, "verdicts.jsonl")
    assert (row["kind"], row["where"]) == ("not_finite", None)
    assert "hardware" in row["cause"]


SLEEP_S = 0.2


class Sleeper:
    """Takes batches late: by what is long beside a step's work, however busy the machine is."""

    def __init__(self, take):
        self._take = take
        self._woke_s = None

    def __call__(self, *args):
        work_s = 0.0 if self._woke_s is None else time.monotonic() - self._woke_s
        time.sleep(max(SLEEP_S, 5 * work_s))
        self._woke_s = time.monotonic()
        return self._take(*args)


def sleep_on_rank_1(trainer):
    if trainer.context.rank == 1:
        trainer.batches.take = Sleeper(trainer.batches.take)


SLEEPERS = {
    "dp2": Layout(dp=2),
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "zero1": Layout(dp=2, zero=1),
    "zero2": Layout(dp=2, zero=2),
    "zero3": Layout(dp=2, zero=3),
}


@pytest.mark.parametrize("layout", SLEEPERS.values(), ids=SLEEPERS)
def test_a_rank_that_sleeps_is_named_with_its_host(ranks, tmp_path, layout):
    config = configure(layout, train={"steps": 7, "micro_batch_size": 4}, monitor=FAST)
    results = ranks.run(train, config, tmp_path, sleep_on_rank_1, ranks=layout.world_size)
    assert set(results) == {OK}
    rows = [row for row in lines(tmp_path, "verdicts.jsonl") if row["kind"] == "straggler"]
    assert [row["where"] for row in rows] == ["rank 1"]
    assert rows[0]["host"] == os.uname().nodename
    assert rows[0]["value"] > rows[0]["high"]
    own = [row["compute_s_by_rank"] for row in lines(tmp_path, "metrics.jsonl")]
    assert all(row[1] > SLEEP_S for row in own)


def test_a_learning_rate_a_hundred_times_too_high_is_named(tmp_path):
    train_table = {"steps": 20, "warmup_steps": 2, "lr": 0.3}
    assert train(0, 1, configure(train=train_table, monitor=FAST), tmp_path) == OK
    assert "update_too_large" in {kind for kind, _ in verdicts(tmp_path)}
    [row] = [r for r in lines(tmp_path, "verdicts.jsonl") if r["kind"] == "update_too_large"]
    assert "train.lr" in row["advice"]


@torch.no_grad()
def dead_unit(trainer):
    for name in ("w1", "w3"):
        weight(trainer, 3, "ffn", name)[5] = 0


def test_a_unit_that_nothing_wakes_is_named(tmp_path):
    assert train(0, 1, configure(train={"lr": 1e-3}), tmp_path, dead_unit) == OK
    assert verdicts(tmp_path) == [("dead_units", "blocks.3")]


@torch.no_grad()
def loud_block(trainer):
    for path in (("attn", "wo"), ("ffn", "w2")):
        weight(trainer, 2, *path).mul_(1e3)


def test_a_block_that_multiplies_the_variance_is_named(tmp_path):
    assert train(0, 1, configure(train={"steps": 2}), tmp_path, loud_block) == OK
    assert ("variance_grows", "blocks.2") in verdicts(tmp_path)


@torch.no_grad()
def cut_off_block(trainer):
    # What it adds to the stream is zero, and so is what comes back to all but these two.
    for path in (("attn", "wo"), ("ffn", "w2")):
        weight(trainer, 1, *path).zero_().requires_grad_(False)
    for path in (("attn_norm",), ("ffn_norm",), ("attn", "wq"), ("ffn", "w1")):
        weight(trainer, 1, *path).requires_grad_(True)


def test_a_block_without_gradients_is_named(tmp_path):
    config = configure(train={"weight_decay": 0.0, "lr": 1e-3})
    assert train(0, 1, config, tmp_path, cut_off_block) == OK
    assert set(verdicts(tmp_path)) == {
        ("gradient_vanishes", "blocks.1"),
        ("update_too_small", "blocks.1"),
    }


def test_a_corrupted_batch_is_a_loss_spike_told_once(tmp_path):
    def corrupt_step_30(trainer):
        batch = trainer.data.batch

        def corrupted(step, rows):
            inputs, targets = batch(step, rows)
            return (inputs, 255 - targets) if step == 29 else (inputs, targets)

        trainer.data.batch = corrupted

    steps = {"steps": 40, "warmup_steps": 4, "lr": 1e-2}
    config = configure(train=steps, monitor={"health_every": 0, "straggler_steps": 30})
    assert train(0, 1, config, tmp_path, corrupt_step_30) == OK
    spikes = [row for row in lines(tmp_path, "verdicts.jsonl") if row["kind"] == "loss_spike"]
    assert [row["step"] for row in spikes] == [30]
    assert spikes[0]["value"] == lines(tmp_path, "metrics.jsonl")[29]["loss_z"] > 6


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(dp=2), id="dp2"),
        pytest.param(Layout(pp=2), id="pp2", marks=pytest.mark.slow),
        pytest.param(Layout(dp=2, zero=3), id="zero3", marks=pytest.mark.slow),
    ],
)
def test_a_clean_run_of_200_steps_has_no_verdict(ranks, tmp_path, layout):
    steps = {"steps": 200, "warmup_steps": 20, "global_batch_size": 8, "micro_batch_size": 4}
    config = configure(layout, train=steps, monitor={"health_every": 20})
    assert ranks.run(train, config, tmp_path, ranks=2) == [OK, OK]
    assert lines(tmp_path, "verdicts.jsonl") == []
    rows = lines(tmp_path, "metrics.jsonl")
    assert len(rows) == 200
    assert sum("update_ratio_by_layer" in row for row in rows) == 10


def test_every_kind_has_words():
    assert all(kind.severity in ("warning", "error") and kind.title for kind in VERDICTS.values())
